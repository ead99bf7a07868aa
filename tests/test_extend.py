"""The walk-throughs of docs/extend.md, carried out: their files written, their commands run, in fresh interpreters."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
# Files of each walk-through, its test among them.
FILES = {"A reward": 2, "A shape": 2, "A method": 3, "A gate": 2, "An engine": 2}
QUICK = ["eval.limit=4", "eval.max_tokens=8", "record.tensorboard=false"]


def test_there_are_five_walk_throughs():
    assert set(SECTIONS) == set(FILES)


@pytest.mark.parametrize("title", FILES)
def test_walk_through(title, tmp_path):
    blocks = FENCE.findall(SECTIONS[title])
    files = {text.partition("\n")[0].removeprefix("# "): text for language, text in blocks if language != "bash"}
    assert len(files) == FILES[title]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    commands = [shlex.split(line) for language, text in blocks if language == "bash" for line in text.splitlines()]
    pytest_line, luffy_line = commands
    assert pytest_line[:3] == ["python", "-m", "pytest"] and luffy_line[0] == "luffy"
    run([["luffy", *luffy_line[1:], *QUICK], pytest_line[2:]], tmp_path)
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    assert '"step": 2' in metrics.read_text()


# One process for both commands, because importing torch takes longer than either.
DRIVER = """
import runpy, sys
for command in COMMANDS:
    sys.argv = command
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
"""


def run(commands, folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = DRIVER.replace("COMMANDS", repr(commands))
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
