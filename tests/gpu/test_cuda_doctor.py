"""`luffy doctor` on a GPU: alone, and as several NCCL ranks that share it."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu


def examined_gpu(tmp_path, *arguments):
    """Status and text of every line, by its check."""
    command = [sys.executable, "-m", "luffy", "doctor", "model.device=cuda", f"out={tmp_path}", "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode in (0, 1), result.stderr  # packages of this machine may differ from the tested ones
    report = json.loads(result.stdout)
    return report, {line["check"]: (line["status"], line["found"]) for line in report["checks"]}


def test_one_process_agrees_with_the_cpu(tmp_path):
    report, lines = examined_gpu(tmp_path)
    for check in ("driver", "NCCL", "speed", "gradient", "engine"):
        assert lines[check][0] == "ok", lines[check]
    assert report["facts"]["engine"]["0"].keys() == {"float32", "bfloat16"}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("more", [(), ("parallel.cpu_offload=true",)])
def test_ranks_that_share_the_gpu_agree_with_one(tmp_path, ranks, more):
    report, lines = examined_gpu(tmp_path, "launch=torchrun", f"parallel.workers={ranks}", *more)
    checks = ["connection", "gradient", "engine", "weight sync", *["all-gather", "reduce-scatter"] * (ranks > 1)]
    assert {check: lines[check] for check in checks if lines[check][0] != "ok"} == {}
    if ranks > 1:
        assert any("share a GPU" in line["found"] for line in report["checks"] if line["check"] == "devices")
