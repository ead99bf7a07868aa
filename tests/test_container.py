"""The Dockerfile: what it copies is there and let through, its shell is valid, and its steps make a working luffy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def instructions() -> list[tuple[str, str]]:
    """(RUN, its text) and so on, lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def let_through(path: str) -> bool:
    """By .dockerignore; the last line that fits decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern = line.removeprefix("!")
        if fnmatch(path, pattern) or path.startswith(f"{pattern}/") or fnmatch(f"/{path}", pattern.replace("**", "*")):
            ignored = not line.startswith("!")
    return not ignored


def copied() -> dict[str, str]:
    """Where each source of a COPY goes."""
    parts = [text.split() for name, text in instructions() if name == "COPY"]
    return {source: target for *sources, target in parts for source in sources}


def test_it_builds_on_any_base_and_starts_luffy():
    steps = instructions()
    assert steps[:2] == [("ARG", "BASE=python:3.12-slim"), ("FROM", "${BASE}")]
    assert json.loads(dict(steps)["ENTRYPOINT"]) == ["luffy"] and json.loads(dict(steps)["CMD"]) == ["--help"]


def test_what_it_copies_is_there_and_let_through():
    assert {"pyproject.toml", "README.md", "LICENSE", "luffy"} <= set(copied())  # what a wheel is built from
    for source in copied():
        assert (ROOT / source).exists() and let_through(source), source
    assert let_through("luffy/recipes/sizes/tiny.yaml")
    assert not any(map(let_through, (".git", ".venv", "runs", "tests/conftest.py", "luffy/__pycache__")))


def test_its_shell_is_valid():
    for name, text in instructions():
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", text], check=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_its_steps_make_a_working_luffy(tmp_path):
    """Carried out without a container: /opt and /work are folders of the test. Downloads what pip downloads."""
    python = tmp_path / "bin"
    python.mkdir()
    (python / "python3").symlink_to(sys.executable)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "CUDA_VERSION")}
    env["PATH"] = f"{python}:{env['PATH']}"
    folder = tmp_path

    def here(text: str) -> str:
        return re.sub(r"(?<![\w.])/(opt|work)\b", rf"{tmp_path}/\1", text)

    for name, text in instructions()[2:]:
        if name == "WORKDIR":
            folder = Path(here(text))
            folder.mkdir(parents=True)
        elif name in ("ENV", "ARG"):
            key, value = here(text).split("=", 1)
            if name == "ENV" or key not in env:
                env[key] = value.replace("$PATH", env["PATH"])
        elif name == "COPY":
            *sources, target = text.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, folder / target)
        elif name == "RUN":
            subprocess.run(["sh", "-e", "-c", here(text)], cwd=folder, env=env, check=True)
    entry = json.loads(dict(instructions())["ENTRYPOINT"])
    command = [*entry, "quickstart", "--methods", "luffy", "--steps", "2"]
    subprocess.run(command, cwd=folder, env=env, check=True)
    summary = json.loads((tmp_path / "work" / "runs" / "quickstart" / "summary.json").read_text())
    assert set(summary["methods"]) == {"luffy"} and "failed" not in summary
