"""The walk-throughs of docs/extend.md: their files are those of examples/extend, their commands and tests run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "luffy"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = ROOT / "examples" / "extend"
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
# Module of each walk-through; its test has the same name.
MODULES = {"A reward": "exact", "A shape": "tanh_shape", "A method": "confident", "An estimator": "loo"}
MODULES |= {"A gate": "half_then_whole", "A tracker": "trackio_tracker", "An engine": "simple_engine"}
QUICK = ["eval.limit=4", "eval.max_tokens=8", "record.tensorboard=false"]
QUICK += ["rollout.n=2", "batch.problems=4"]
DATA = {"train": "train", "eval": "heldout", "eval_also.ood": "ood"}  # 64 problems of each are enough


def walk_through(title):
    """The files that a walk-through shows, by name, and its commands."""
    blocks = FENCE.findall(SECTIONS[title])
    files = {
        text.partition("\n")[0].removeprefix("# "): text.partition("\n")[2] for kind, text in blocks if kind != "bash"
    }
    return files, [shlex.split(line) for kind, text in blocks if kind == "bash" for line in text.splitlines()]


def test_the_page_shows_the_examples_word_for_word():
    assert set(SECTIONS) == set(MODULES)
    shown = {name: text for title in MODULES for name, text in walk_through(title)[0].items()}
    written = {path.name: path.read_text() for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
    assert shown == {name: written[name] for name in shown}
    linked = {f"test_{module}.py" for module in MODULES.values()} | {"simple_engine.py"}
    assert linked == set(written) - set(shown) and all(f"(../examples/extend/{name})" in PAGE for name in linked)


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
    for title, module in MODULES.items():
        folder = tmp_path / title
        folder.mkdir()
        _, (luffy_line,) = walk_through(title)
        for path in (*EXAMPLES.glob(f"{module}.*"), EXAMPLES / f"test_{module}.py"):
            shutil.copy(path, folder)
        if title == "A tracker":  # in place of the package, which may not be installed
            stand_in = "def init(**given): ...\ndef log(values, step): ...\ndef finish(): ...\n"
            (folder / "trackio.py").write_text(stand_in)
        assert luffy_line[0] == "luffy"
        tests = ["pytest", "-q", f"test_{module}.py"]
        commands += [(title, str(folder), c) for c in ([*luffy_line, *quick], tests)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = DRIVER.replace("COMMANDS", repr(commands))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert json.loads(done.stdout.splitlines()[-1]) == {title: [0, 0] for title in MODULES}, (
        f"{done.stdout}\n{done.stderr}"
    )
    for title in MODULES:
        (metrics,) = (tmp_path / title / "runs").rglob("metrics.jsonl")
        assert '"step": 2' in metrics.read_text()
