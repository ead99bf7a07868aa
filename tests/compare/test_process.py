"""An arm's process: stopped at its seconds, killed if it hangs, named if it fails."""

import sys
from pathlib import Path

import pytest

from luffy.compare import process
from luffy.compare.process import Ended, Job, Process, luffy, module, spent_seconds, together

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


def training(command, tmp_path, seconds, patience):
    (ended,) = together([Job(command, tmp_path / "log", patience, tmp_path, seconds)])
    return ended


def test_a_file_of_the_current_folder_is_no_module_of_a_process_of_luffy(tmp_path, monkeypatch):
    """`-m` would put the folder first on the path."""
    monkeypatch.chdir(tmp_path)
    for name in ("luffy", "secrets", "json"):
        (tmp_path / f"{name}.py").write_text(f"open('taken', 'a').write('{name}')")
    monkeypatch.setenv("PYTHONPATH", str(Path(process.__file__).parents[2]))
    ended, holder = together(
        [Job(luffy("recipes"), tmp_path / "log"), Job(module("luffy.compare.base_holder", "{"), tmp_path / "holder")]
    )
    assert ended == Ended(True) and "tools/sft" in (tmp_path / "log").read_text()
    assert "JSONDecodeError" in holder.why and not (tmp_path / "taken").exists()


def test_it_is_stopped_at_its_seconds(script, tmp_path):
    ended = training(script(), tmp_path, 6.0, 60.0)
    assert (ended.finished, ended.why) == (False, "") and spent_seconds(tmp_path) >= 6.0


def test_it_may_finish_before(script, tmp_path):
    assert training(script(steps=3), tmp_path, 600.0, 60.0) == Ended(True)


def test_a_failure_is_its_last_line(script, tmp_path):
    end = 'print("luffy: error: stopped at step 2: not finite", file=sys.stderr); sys.exit(1)'
    ended = training(script(steps=3, end=end), tmp_path, 600.0, 60.0)
    assert (ended.finished, ended.why, ended.code) == (False, "stopped at step 2: not finite", 1)


def test_one_that_hangs_is_killed(script, tmp_path, monkeypatch):
    ended = training(script(steps=2, end="time.sleep(600)"), tmp_path, 600.0, 2.0)
    assert ended.why == "no step in 2 s"
    monkeypatch.setattr(process, "TO_STOP_S", 1.0)
    deaf = script(steps=20, end="", pause=0.2)
    deaf[2] = deaf[2].replace("signal.signal(signal.SIGTERM, stop)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    deaf[2] += "\ntime.sleep(600)"
    (tmp_path / "metrics.jsonl").unlink()
    assert training(deaf, tmp_path, 3.0, 600.0).why == "did not stop in 1 s"


def test_others_go_on_beside_one_that_fails_and_one_that_hangs(tmp_path):
    """Three at once: a file that one waits for is written by another, so they do run side by side."""
    first = f"import time; open({str(tmp_path / 'a')!r}, 'w'); time.sleep(600)"
    second = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'a')!r}): time.sleep(0.05)"
    jobs = [
        Job([sys.executable, "-c", first], tmp_path / "1", 5.0),
        Job([sys.executable, "-c", second], tmp_path / "2", 60.0),
        Job([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path / "3", 60.0),
    ]
    assert [ended.why for ended in together(jobs)] == ["took more than 5 s", "", "ended by SIGKILL"]


def test_threads_and_signals_of_a_child(tmp_path):
    code = "import os, signal; print(os.environ['OMP_NUM_THREADS'], signal.getsignal(signal.SIGINT).__name__, os.getsid(0) == os.getpid())"
    assert together([Job([sys.executable, "-c", code], tmp_path / "log")], {"OMP_NUM_THREADS": "3"}) == [Ended(True)]
    assert (tmp_path / "log").read_text().split() == ["3", "default_int_handler", "True"]


WAITS = """
import os, signal, sys, time
def stop(*_):
    open({own!r}, "w")
    while not os.path.exists({other!r}): time.sleep(0.05)
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
open({own!r} + "-ready", "w")
time.sleep(600)
"""


def test_an_interrupt_asks_all_before_it_waits_for_one(tmp_path, monkeypatch):
    """Either ends when the other was asked too."""
    files = [str(tmp_path / name) for name in "ab"]
    codes = [WAITS.format(own=own, other=other) for own, other in (files, files[::-1])]
    jobs = [Job([sys.executable, "-c", code], tmp_path / "log") for code in codes]
    started, poll = {}, Process.poll

    def interrupted(self):
        started[id(self)] = self
        if len(started) == 2 and all(Path(f"{file}-ready").exists() for file in files):
            raise KeyboardInterrupt
        return poll(self)

    monkeypatch.setattr(process, "TO_STOP_S", 5.0)
    monkeypatch.setattr(Process, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together(jobs)
    assert [poll(one).code for one in started.values()] == [5, 5]


def test_an_interrupt_ends_all(tmp_path, monkeypatch):
    jobs = [Job([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / str(i)) for i in range(2)]
    started, poll = [], Process.poll

    def interrupted(self):
        started.append(self)
        if len(started) == 2:
            raise KeyboardInterrupt
        return poll(self)

    monkeypatch.setattr(Process, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together(jobs)
    assert [poll(one).why for one in started] == ["ended by SIGTERM"] * 2
