"""An arm's process: stopped at its seconds, killed if it hangs, named if it fails."""

import json
import sys

import pytest

from luffy.compare import process
from luffy.compare.process import run, spent_seconds, train_until

STEPS = """
import json, signal, sys, time
def stop(*_):
    print("luffy: stopped at step 3 by SIGTERM", flush=True); sys.exit(1)
signal.signal(signal.SIGTERM, stop)
for step in range(1, {steps}):
    with open({file!r}, "a") as file: file.write(json.dumps({{"step": step, "timing_s/step": 2.0}}) + chr(10))
    time.sleep({pause})
{end}
"""


@pytest.fixture
def script(tmp_path):
    def write(steps=100, pause=0.1, end=""):
        file = str(tmp_path / "metrics.jsonl")
        return [sys.executable, "-c", STEPS.format(steps=steps, pause=pause, file=file, end=end)]

    return write


def test_it_is_stopped_at_its_seconds(script, tmp_path):
    ended = train_until(script(), tmp_path, tmp_path / "log", 6.0, 60.0)
    assert (ended.finished, ended.why) == (False, "") and spent_seconds(tmp_path) >= 6.0


def test_it_may_finish_before(script, tmp_path):
    assert train_until(script(steps=3), tmp_path, tmp_path / "log", 600.0, 60.0).finished


def test_a_failure_is_its_last_line(script, tmp_path):
    end = 'print("luffy: error: stopped at step 2: not finite", file=sys.stderr); sys.exit(1)'
    ended = train_until(script(steps=3, end=end), tmp_path, tmp_path / "log", 600.0, 60.0)
    assert (ended.finished, ended.why) == (False, "stopped at step 2: not finite")


def test_one_that_hangs_is_killed(script, tmp_path, monkeypatch):
    ended = train_until(script(steps=2, end="time.sleep(600)"), tmp_path, tmp_path / "log", 600.0, 2.0)
    assert ended.why == "no step in 2 s" and ended.wall < 60
    monkeypatch.setattr(process, "TO_STOP_S", 1.0)
    deaf = [*script(steps=2, end="signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "timing_s/step": 99.0}) + "\n")
    assert train_until(deaf, tmp_path, tmp_path / "log", 5.0, 600.0).why in ("did not stop in 1 s", "")


def test_a_command_that_ends_or_takes_too_long(tmp_path):
    assert run([sys.executable, "-c", "pass"], tmp_path / "log", 60.0).finished
    assert (
        run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log", 1.0).why == "took more than 1 s"
    )
    assert (
        run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path / "log", 60.0).why
        == "ended by SIGKILL"
    )
