"""The documentation says only what the code does: links, examples, knobs and recipes are checked."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from luffy.config import Config, built_in_recipes
from luffy.data import load_problems
from luffy.evaluation.accuracy import Summary
from luffy.evaluation.compare import Comparison, Difference, PairedTest
from luffy.quickstart.run import MethodOutcome
from luffy.report.curves import Estimate
from luffy.rewards import build_verifier
from luffy.run_folder.console import FIELDS
from luffy.schema import describe
from luffy.types import Problem

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "studies/paper/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FILE_ENDINGS = {"jsonl", "json", "yaml", "py", "md", "parquet", "safetensors", "html", "txt"}

KNOBS = {doc.path: doc.kind for doc in describe(Config)}
SECTIONS = {path.split(".")[0] for path in KNOBS if "." in path}
KNOB = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_0-9]+)+)(?![\w/(-])")
RECIPE = re.compile(r"(?<![\w-])(?:tiny|small|paper|sizes|methods)/[\w.]*\w")


def blocks(page, language):
    return [match[3] for match in FENCE.finditer(page.read_text()) if match[2] == language]


def code_spans(page):
    """Inline code and the lines of shell examples."""
    text = page.read_text()
    return INLINE.findall(FENCE.sub("", text)) + [line for block in blocks(page, "bash") for line in block.splitlines()]


def anchor(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def sections_of(page):
    """Titles of third-level headings in backticks, with the text below each."""
    for part in re.split(r"^##+ ", page.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        if re.fullmatch(r"`\w+`", title):
            yield title.strip("`"), body


def leads_somewhere(page, target):
    name, _, place = target.partition("#")
    linked = page.parent / name if name else page
    if not linked.exists():
        return False
    return not place or place in {anchor(h) for h in HEADING.findall(FENCE.sub("", linked.read_text()))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = LINK.findall(FENCE.sub("", page.read_text()))
    local = [target for target in targets if not re.match(r"\w+:", target)]  # not https:, mailto:
    assert [target for target in local if not leads_somewhere(page, target)] == []


def listed_in_page(nav):
    """The paths of a navigation of MkDocs."""
    if isinstance(nav, str):
        return [nav]
    return [path for part in (nav.values() if isinstance(nav, dict) else nav) for path in listed_in_page(part)]


def test_the_navigation_of_the_site_names_every_page_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(listed_in_page(nav)) == sorted(page.relative_to(ROOT).as_posix() for page in PAGES)


EXAMPLES = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("methods/loss", "methods/luffy", "data", "rewards", "environments")
    for number, block in enumerate(blocks(ROOT / "docs" / f"{name}.md", "python"), start=1)
]


@pytest.mark.parametrize("source", EXAMPLES)
def test_python_examples_run(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(compile(source, "<example>", "exec"), {"__name__": "example"})


def is_knob(path):
    """A knob, a section above knobs, or an entry of a knob that is a mapping."""
    parent = path.rpartition(".")[0]
    return (
        path in KNOBS
        or path.startswith("stages.")
        or KNOBS.get(parent) == "mapping"
        or any(knob.startswith(path + ".") for knob in KNOBS)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_knobs_exist(page):
    found = {path for span in code_spans(page) for path in KNOB.findall(span)}
    unknown = {path for path in found if not is_knob(path) and path.rpartition(".")[2] not in FILE_ENDINGS}
    assert unknown == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_exist(page):
    named = {name.removesuffix(".yaml") for span in code_spans(page) for name in RECIPE.findall(span)}
    assert named - set(built_in_recipes()) == set()


def test_the_checks_see_what_is_wrong():
    assert KNOB.findall("optim.lrr=1") == ["optim.lrr"] and not is_knob("optim.lrr")
    assert is_knob("data.columns.traces") and is_knob("model.lora.rank") and not is_knob("guidance.nprefix")
    assert RECIPE.findall("luffy train tiny/lufy.") == ["tiny/lufy"]
    page = ROOT / "docs" / "methods.md"
    assert leads_somewhere(page, "data.md#traces") and leads_somewhere(page, "#notation")
    assert not leads_somewhere(page, "data.md#no-such-place") and not leads_somewhere(page, "no_such_page.md")


@pytest.mark.parametrize(("name", "body"), list(sections_of(ROOT / "docs" / "data.md")))
def test_example_rows_read_as_their_format(name, body, tmp_path):
    (row,) = [match[3] for match in FENCE.finditer(body) if match[2] == "json"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(json.loads(row)) + "\n")
    problems = load_problems(tmp_path / "rows.jsonl")
    assert problems.schemas == (name,)
    assert problems[0].answer == "5" and len(problems[0].traces) == 1


def cases(body):
    """Rows of a table of gold, response, score and status."""
    for line in body.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and cells[0].startswith("`"):
            yield cells[0].strip("`"), cells[1].strip("`"), float(cells[2]), cells[3]


@pytest.mark.parametrize(("kind", "body"), list(sections_of(ROOT / "docs" / "results" / "verifier.md")))
def test_example_scores_are_the_rewards_own(kind, body):
    golds, responses, values, statuses = zip(*cases(body), strict=True)
    with build_verifier(kind, workers=1) as verifier:
        items = [(Problem(str(i), "", gold), text) for i, (gold, text) in enumerate(zip(golds, responses, strict=True))]
        scores = verifier.score(items)
    assert [(s.value, s.status) for s in scores] == list(zip(values, statuses, strict=True))


def test_the_comparison_of_methods_has_a_row_for_each_recipe():
    page = (ROOT / "docs" / "methods.md").read_text().partition("## Side by side")[2].partition("\n## ")[0]
    rows = [line for line in page.splitlines() if line.startswith("|`")]
    named = {name for row in rows for name in INLINE.findall(row.split("|")[1])}
    recipes = {name.removeprefix("methods/") for name in built_in_recipes() if name.startswith("methods/")}
    assert recipes == named
    assert {row.count("|") for row in rows} == {12}  # ten axes and the name


def test_every_figure_of_the_console_line_has_its_healthy_range():
    rows = [line for line in (ROOT / "docs" / "healthy.md").read_text().splitlines() if line.startswith("|`")]
    named = {INLINE.findall(row)[0] for row in rows}
    assert {label for label, _, _ in FIELDS} <= named and {row.count("|") for row in rows} == {5}


def test_every_key_of_the_json_tables_is_documented():
    page = (ROOT / "docs" / "share.md").read_text(encoding="utf-8").partition("## Tables for scripts")[2]
    tables = (Summary, Comparison, PairedTest, Difference, MethodOutcome, Estimate)
    assert [f.name for table in tables for f in fields(table) if f"`{f.name}`" not in page] == []


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md", "docs/results/reliability.md"])
def test_a_user_is_told_that_recipes_run_code(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    (about,) = [part for part in text.split("\n\n") if "can run code" in part]
    assert all(word in about for word in ("plugins", "module:function", "trust_remote_code")), about
    assert "dry run" in about or "--dry-run" in about
