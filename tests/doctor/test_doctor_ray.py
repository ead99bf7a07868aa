"""`luffy doctor launch=ray` on a cluster that it starts itself. `make test-ray` sets Ray up and runs these."""

import importlib.util
import json
import socket
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-ray"),
]
STOPPING = """
import os, signal
from luffy.learn.policy import Policy

if os.environ.get("RANK") == "1":
    Policy.update = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
"""


def doctor_on_ray(*arguments, cwd):
    command = [
        sys.executable,
        "-m",
        "luffy",
        "doctor",
        "model.device=cpu",
        "launch=ray",
        "parallel.workers=2",
        "--json",
    ]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=500, cwd=cwd)


def test_the_workers_report_to_the_command(tmp_path):
    result = doctor_on_ray("--anonymous", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["launch"] == "ray" and report["machines"] == [{"name": "machine0", "ranks": [0, 1]}]
    passed = {line["check"] for line in report["checks"] if line["status"] == "ok"}
    assert {"connection", "all-gather", "reduce-scatter", "gradient", "engine", "weight sync"} <= passed
    assert str(tmp_path) not in result.stdout and "doctor: gradient" in result.stderr


def test_a_worker_that_stops_is_named(tmp_path):
    (tmp_path / "stopping.py").write_text(STOPPING)
    result = doctor_on_ray("plugins=[stopping.py]", "--timeout", "30", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    lines = {line["check"]: line for line in json.loads(result.stdout)["checks"]}
    assert lines["gradient"]["found"].startswith(f"rank 1 on {socket.gethostname()} does not answer")
    assert lines["all-gather"]["status"] == "ok"
