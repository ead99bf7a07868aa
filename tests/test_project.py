"""The door: workflow, hooks and contributing page name commands that exist."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
if not (ROOT / ".github").is_dir():
    pytest.skip("not a checkout", allow_module_level=True)
COMMAND = r"(?:`|^)make ([\w-]+)(?=`|  |$)"
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_workflow_runs_both_commands_and_the_install_on_both_processors():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]
    commands = [step["run"].removeprefix("make ") for step in job["steps"] if "run" in step]
    assert commands == ["test", "quickstart", "test-wheel", "test-examples"] and set(commands) <= TARGETS
    assert job["strategy"]["matrix"] == {
        "os": ["ubuntu-latest", "ubuntu-24.04-arm"],
        "python": ["3.11", "3.12", "3.13"],
    }


def test_the_site_is_published_from_what_was_tested():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["build"]["steps"] if "run" in step] == ["make test-docs", "make docs-site"]
    assert {"test-docs", "docs-site"} <= TARGETS
    folder = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["site_dir"]
    assert jobs["build"]["steps"][-1]["with"] == {"path": folder} and jobs["publish"]["needs"] == "build"


def test_hooks_run_what_make_lint_runs():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].removeprefix(".venv/bin/") for hook in repo["hooks"]]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    commands = [line.strip().removeprefix("$(BIN)/") for line in lint.splitlines()]
    assert [entry.split()[:2] for entry in entries] == [command.split()[:2] for command in commands]


def test_targets_named_in_pages_exist():
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {target for page in pages for target in re.findall(COMMAND, page.read_text(), re.MULTILINE)}
    assert "test" in named and named - TARGETS == set()


def test_issue_templates_are_short_and_named():
    templates = list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert len(templates) == 2
    for template in templates:
        head = yaml.safe_load(template.read_text().split("---")[1])
        assert head["name"] and head["about"] and len(template.read_text().split()) < 100
