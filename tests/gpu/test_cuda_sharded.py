"""Sharded weights, NCCL, the copy that rolls out and rollouts ahead, on one GPU: what one GPU can show of them."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import yaml

pytest.importorskip("triton")

from luffy.rollout.native.decode_graphs import capturing
from luffy.run_folder.recorder import read_json_lines
from luffy.run_folder.timing import Stopwatch
from luffy.schema import to_dict
from luffy.step.prefetch import own_stream
from luffy.train.loop import Trainer

pytestmark = pytest.mark.gpu


def run_as_command(cfg, tmp_path):
    """In processes of its own: this one already holds CUDA."""
    recipe = tmp_path / f"{cfg.name}.yaml"
    recipe.write_text(yaml.safe_dump(to_dict(cfg)))
    result = subprocess.run(
        [sys.executable, "-m", "luffy", "train", recipe], capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr
    return read_json_lines(cfg.folder / "metrics.jsonl")


def run_here(cfg):
    with Trainer(cfg) as trainer:
        trainer.train()
    return read_json_lines(cfg.folder / "metrics.jsonl")


@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_a_sharded_process_agrees_with_a_plain_one(make_config, tmp_path, dtype, tolerance, cpu_offload):
    common = {"model": {"device": "cuda", "dtype": dtype}, "optim": {"lr": 1e-3, "eps": 1e-3}}
    plain = run_here(make_config(name="plain", **common))
    sharded = make_config(name="sharded", launch="torchrun", parallel={"cpu_offload": cpu_offload}, **common)
    rows = run_as_command(sharded, tmp_path)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert all(r["rollout/logprob_diff_mean"] < (1e-4 if dtype == "float32" else 0.05) for r in rows)
    assert rows[0]["actor/loss"] == pytest.approx(plain[0]["actor/loss"], abs=tolerance)
    assert rows[0]["actor/grad_norm"] == pytest.approx(plain[0]["actor/grad_norm"], rel=max(tolerance, 1e-2))
    longer = make_config(
        name="sharded", launch="torchrun", parallel={"cpu_offload": cpu_offload}, train={"steps": 6}, **common
    )
    assert [r["step"] for r in run_as_command(longer, tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_rollouts_ahead_on_their_own_stream(make_config):
    """With weights that do not move, a rollout made during an update is what it would have been after it."""
    common = {"model": {"device": "cuda"}, "optim": {"lr": 1e-30}, "train": {"steps": 6}}
    calm = run_here(make_config(name="calm", **common))
    ahead = run_here(make_config(name="ahead", **common, **{"async": {"max_staleness": 1}}))
    for a, b in zip(ahead, calm, strict=True):
        assert a["async/ess"] == pytest.approx(1, abs=1e-3)
        assert a["actor/loss"] == pytest.approx(b["actor/loss"], abs=1e-3)
    moving = run_here(make_config(name="moving", **(common | {"optim": {"lr": 1e-2}, "async": {"max_staleness": 1}})))
    assert [r["async/staleness/max"] for r in moving] == [0, 1, 1, 1, 1, 1]
    assert all(0 < r["async/ess"] < 1 for r in moving[1:])


def test_a_phase_may_end_while_another_thread_captures():
    """CUDA forbids waiting for the device then, and both the phase and the capture would fail."""
    x = torch.ones(4, device="cuda")
    began, ended = threading.Event(), threading.Event()

    def capture():
        with own_stream(x.device), capturing(None) as graph:
            y = x + 1
            began.set()
            assert ended.wait(60)
        graph.replay()
        torch.cuda.current_stream().synchronize()
        return y.tolist()

    watch = Stopwatch()
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(capture)
        assert began.wait(60)
        try:
            with watch("update"):
                total = float((x * 3).sum())
        finally:
            ended.set()
        assert (total, made.result()) == (12.0, [2.0] * 4) and watch.take()["timing_s/update"] > 0
