"""Several processes on the CPU, connected by gloo, each running the same function."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from luffy.distributed.shard import whole
from luffy.distributed.world import join_world, leave_world
from luffy.report.recorder import read_json_lines
from luffy.train.loop import Trainer
from luffy.train.optim import Optimizer

UNTIMED = ("timing_s/", "perf/throughput")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_ranks(count, act, folder):
    """Fork ``count`` processes; each leaves what ``act(world)`` returns in ``folder``. Gives their ids."""
    port = free_port()
    pids = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            _be(rank, count, port, act, folder)
        pids.append(pid)
    return pids


def _be(rank, count, port, act, folder):
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank),
                       "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        torch.set_num_threads(1)
        result = act(join_world("cpu", 60))
        (folder / f"rank-{rank}").write_bytes(pickle.dumps(result))
        leave_world()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run_ranks(count, act):
    """What ``act(world)`` returns on each of ``count`` processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        statuses = [os.waitpid(pid, 0)[1] for pid in start_ranks(count, act, folder)]
        assert statuses == [0] * count, f"exit statuses {statuses}"
        return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(count)]


def train(cfg, world=None, method="rl", **options):
    with Trainer(cfg, method, world=world, **options) as trainer:
        trainer.train()


def train_and_keep_gradients(cfg, world=None, method="rl"):
    """The whole gradients of every optimizer step, as the optimizer gets them."""
    kept, step = [], Optimizer.step

    def keep(self, lr, norm):
        kept.append({name: whole(m.grad).clone() for name, m in self.masters.items() if m.grad is not None})
        step(self, lr, norm)

    Optimizer.step = keep
    try:
        train(cfg, world, method)
    finally:
        Optimizer.step = step
    return kept


def figures(cfg):
    """The metrics of a run, without those that tell the time."""
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(UNTIMED)} for row in rows]


def samples(cfg):
    return read_json_lines(cfg.folder / "samples.jsonl")


def final_weights(cfg):
    newest = max((cfg.folder / "checkpoints").glob("step-*"))
    return AutoModelForCausalLM.from_pretrained(newest / "model").state_dict()


def assert_same_figures(ours, theirs, tolerance=1e-5):
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        far = {k: (a[k], b[k]) for k in a if abs(a[k] - b[k]) > tolerance * max(1.0, abs(b[k]))}
        assert far == {}, f"step {a['step']}"


def assert_same_weights(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
