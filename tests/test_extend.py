"""The walk-throughs of docs/extend.md, carried out: their files written, their commands run, in fresh interpreters."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "luffy"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
# Files of each walk-through, its test among them.
FILES = {"A reward": 2, "A shape": 2, "A method": 3, "An estimator": 3, "A gate": 2, "A tracker": 2, "An engine": 2}
QUICK = ["eval.limit=4", "eval.max_tokens=8", "record.tensorboard=false"]
QUICK += ["rollout.n=2", "batch.problems=4"]
DATA = {"train": "train", "eval": "heldout", "eval_also.ood": "ood"}  # 64 problems of each are enough


def test_there_are_seven_walk_throughs():
    assert set(SECTIONS) == set(FILES)


DRIVER = """
import json, os, runpy, sys, traceback
codes = {}
for title, folder, command in COMMANDS:
    os.chdir(folder)
    sys.argv, sys.path[0] = command, folder
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        codes.setdefault(title, []).append(int(end.code or 0))
    except BaseException:
        traceback.print_exc()
        codes.setdefault(title, []).append(1)
print(json.dumps(codes))
"""


@pytest.mark.slow
def test_walk_throughs(tmp_path):
    """One process for all, because importing torch takes longer than any of them."""
    commands = []
    for name in DATA.values():
        lines = (PACKAGE / "quickstart" / "assets" / "data" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:64]))
    quick = QUICK + [f"data.{key}={tmp_path / name}.jsonl" for key, name in DATA.items()]
    for title, count in FILES.items():
        folder = tmp_path / title
        folder.mkdir()
        blocks = FENCE.findall(SECTIONS[title])
        files = {text.partition("\n")[0].removeprefix("# "): text for language, text in blocks if language != "bash"}
        assert len(files) == count
        for name, text in files.items():
            (folder / name).write_text(text)
        lines = [shlex.split(line) for language, text in blocks if language == "bash" for line in text.splitlines()]
        if title == "A tracker":  # in place of the package, which may not be installed
            stand_in = "def init(**given): ...\ndef log(values, step): ...\ndef finish(): ...\n"
            (folder / "trackio.py").write_text(stand_in)
        pytest_line, luffy_line = lines
        assert pytest_line[:3] == ["python", "-m", "pytest"] and luffy_line[0] == "luffy"
        commands += [(title, str(folder), c) for c in (["luffy", *luffy_line[1:], *quick], pytest_line[2:])]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = DRIVER.replace("COMMANDS", repr(commands))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert json.loads(done.stdout.splitlines()[-1]) == {title: [0, 0] for title in FILES}, (
        f"{done.stdout}\n{done.stderr}"
    )
    for title in FILES:
        (metrics,) = (tmp_path / title / "runs").rglob("metrics.jsonl")
        assert '"step": 2' in metrics.read_text()
