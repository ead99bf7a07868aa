"""The package as it is installed: the wheel, the advice on extras, the check of the pins."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_command(*command, cwd, **env):
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # make test-wheel installs it
def test_the_wheel_holds_every_file_and_works_from_another_folder(tmp_path):
    """Built from a copy: a build leaves files behind. Built and unpacked as pip does it, and the packages beside it are
    those of the tests; `make test-wheel` has pip, a fresh environment and the whole quickstart."""
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    shutil.copytree(ROOT / "luffy", source / "luffy", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    expected = {path.relative_to(source).as_posix() for path in (source / "luffy").rglob("*") if path.is_file()}
    backend = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run_command(sys.executable, "-c", backend, tmp_path, cwd=source)
    (wheel,) = tmp_path.glob("luffy_rl-*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert {name for name in file.namelist() if name.startswith("luffy/")} == expected
        file.extractall(site)
    elsewhere.mkdir()
    luffy = "import luffy.cli, sys; print(luffy.cli.__file__); sys.argv[0] = 'luffy'; luffy.cli.main()"
    said = run_command(
        sys.executable, "-c", luffy, "train", "tiny/luffy", "--dry-run", cwd=elsewhere, PYTHONPATH=str(site)
    )
    assert said.startswith(str(site)) and "traces     64 of the first 64 are correct" in said


def test_advice_names_extras_that_exist():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    sources = "".join(path.read_text() for path in (ROOT / "luffy").rglob("*.py"))
    advised = set(re.findall(r"(?:how_to_install\(|needing\(\"[^\"]+\", )[\"'](\w+)[\"']", sources))
    assert (
        advised == {"environments", "peft", "qlora", "ray", "reasoning_gym", "search", "trl", "verifiers", "vllm"}
        and advised | {"wandb"} <= extras
    )  # trackers name their own
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = {page.name: page.read_text() for page in pages if page.name != "log.md"} | {"luffy": sources}
    assert [name for name, text in texts.items() if "luffy-rl[" in text] == []  # the package is not on PyPI
    for text in texts.values():
        for named in re.findall(r"pip install[^`\n]*'\.\[([\w,-]+)\]'", text):
            assert set(named.split(",")) <= extras, named


def test_the_check_of_the_pins_says_when_it_cannot_ask():
    command = [sys.executable, ROOT / ".ci" / "check_install.py", "uv"]
    env = os.environ | {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    for more, code in (([], 3), (["--offline-ok"], 0)):
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith("NOT CHECKED whether the pinned packages can be installed: http://127.0.0.1:9")
