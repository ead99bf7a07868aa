"""`luffy doctor` as a user runs it: alone, under torchrun, with a rank that hangs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from luffy.config import Config
from luffy.doctor import machine
from luffy.doctor.examination import Examination
from luffy.schema import build

HANGING = """
import os, signal, time
from luffy.doctor import numerics

def hang(*_, **__):
    {how}

if os.environ.get("RANK") == "{rank}":
    numerics.whole_gradients = hang
"""
STOPS, SLEEPS = "os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(600)"


def doctor(*arguments, cwd):
    command = [sys.executable, "-m", "luffy", "doctor", "model.device=cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=cwd)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(machine, "MOST_BYTES", 1 << 20)


def test_alone_it_checks_what_applies_and_prints_a_table(tmp_path, capsys, quick):
    Examination(build(Config, {"out": str(tmp_path), "model": {"device": "cpu"}})).alone()
    shown = capsys.readouterr().out
    assert "launch=local: 1 process on 1 machine" in shown
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert " ok " in lines["engine"] and "skipped" in lines["gradient"] and "skipped" in lines["bandwidth"]
    assert "failed" not in shown and str(tmp_path) in lines["disk"]


@pytest.mark.skipif(os.name != "posix" or not Path("/proc/version").exists(), reason="needs Linux")
def test_what_fails_has_a_remedy_and_the_exit_code_is_1(capsys):
    """Nobody can write to /proc; the other checks go on."""
    cfg = build(Config, {"out": "/proc/runs", "model": {"device": "cpu"}})
    with pytest.raises(SystemExit) as ended:
        Examination(cfg, as_json=True, anonymous=True).alone()
    report = json.loads(capsys.readouterr().out)
    (line,) = [line for line in report["checks"] if line["status"] == "failed"]
    assert ended.value.code == 1 and report["passed"] is False
    assert line["check"] == "disk" and "out=FOLDER" in line["remedy"] and "PATH" in line["found"]
    assert {line["check"]: line["status"] for line in report["checks"]}["engine"] == "ok"


@pytest.mark.slow
def test_under_torchrun_it_compares_the_ranks_and_the_anonymous_json_names_nobody(tmp_path):
    result = doctor("launch=torchrun", "parallel.workers=2", f"out={tmp_path}", "--json", "--anonymous", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["launch"] == "torchrun" and report["machines"] == [{"name": "machine0", "ranks": [0, 1]}]
    passed = {line["check"] for line in report["checks"] if line["status"] == "ok"}
    assert {"connection", "all-gather", "reduce-scatter", "gradient", "engine", "weight sync"} <= passed
    assert str(tmp_path) not in result.stdout and str(Path.home()) not in result.stdout
    assert f'"{socket.gethostname()}"' not in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("how", "rank", "said"), [(STOPS, 1, "does not answer"), (STOPS, 0, "does not answer"), (SLEEPS, 1, "did not go on for 30 s")])  # fmt: skip
def test_a_rank_that_hangs_is_named_with_the_results_so_far(tmp_path, how, rank, said):
    (tmp_path / "hanging.py").write_text(HANGING.format(how=how, rank=rank))
    result = doctor("launch=torchrun", "parallel.workers=3", "plugins=[hanging.py]", "--timeout", "30", "--json", cwd=tmp_path)  # fmt: skip
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    lines = {line["check"]: line for line in report["checks"]}
    assert lines["gradient"]["status"] == "failed" and lines["gradient"]["remedy"]
    assert lines["gradient"]["found"].startswith(f"rank {rank} on {socket.gethostname()} {said}")
    assert lines["all-gather"]["status"] == "ok" and lines["engine"]["found"] == "not reached"


@pytest.mark.slow
def test_an_error_of_one_rank_is_named_and_ends_the_others_that_wait_for_it(tmp_path):
    error = "raise RuntimeError('CUDA error: an illegal memory access')"
    (tmp_path / "failing.py").write_text(HANGING.format(how=error, rank=1))
    result = doctor("launch=torchrun", "parallel.workers=2", "plugins=[failing.py]", "--json", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    lines = {line["check"]: line for line in json.loads(result.stdout)["checks"]}
    assert lines["gradient"]["found"] == (
        f"rank 1 on {socket.gethostname()}: RuntimeError: CUDA error: an illegal memory access"
    )
    assert lines["gradient"]["status"] == "failed" and lines["engine"]["found"] == "not reached"


def test_mistakes_are_one_line(tmp_path):
    result = doctor("no_such_recipe", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "no_such_recipe" in result.stderr
