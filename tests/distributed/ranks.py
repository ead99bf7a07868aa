"""Several processes that each run the same function in a fresh interpreter: on the CPU, connected by gloo, or on one GPU,
connected by NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from children import LIMIT_S, Child, end_children, in_children
from torch.distributed import TCPStore
from trainings import assert_same_metrics, assert_same_weights, final_weights, samples, train, untimed_metrics

from luffy.config import to_yaml
from luffy.distributed.shard import whole
from luffy.distributed.world import join_world, leave_world
from luffy.learn.optim import Optimizer

TESTS = Path(__file__).parent.parent


def meeting_place():
    """Where ranks find each other, kept by this process as torchrun keeps it: a port that is only chosen here and bound
    by rank 0 once it has imported torch may be another process's by then."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_ranks(count, act, *args, device="cpu", fresh=False):
    """What ``act(*args, world)`` returns on each of ``count`` processes. It must undo what it patches. ``fresh``: in
    processes that have run nothing before, as hybrid sharding needs: torch keeps the groups of an earlier mesh."""
    if fresh:
        end_children()
    store = meeting_place()
    return in_children(_as_rank, [(rank, count, store.port, device, act, args) for rank in range(count)])


def exit_codes_of_ranks(count, act, *args, device="cpu"):
    """The same for an ``act`` that ends its process: how each process ended."""
    store = meeting_place()
    children = [Child() for _ in range(count)]
    for rank, child in enumerate(children):
        child.start(_as_rank, rank, count, store.port, device, act, args)
    return [child.exit_code() for child in children]


def _as_rank(rank, count, port, device, act, args):
    """NCCL refuses two ranks on one GPU unless it takes them for ranks of different machines."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank),
                   "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "NCCL_HOSTID": f"host{rank}"}  # fmt: skip
    result = act(*args, join_world(device, LIMIT_S))  # a rank whose interpreter starts late is waited for
    leave_world()
    return result


def train_and_keep_gradients(cfg, method, world=None):
    """The whole gradients of every optimizer step, as the optimizer gets them."""
    kept, step = [], Optimizer.step

    def keep(self, lr, norm):
        kept.append(
            {name: whole(m.grad).to("cpu", copy=True) for name, m in self.masters.items() if m.grad is not None}
        )
        step(self, lr, norm)

    Optimizer.step = keep
    try:
        train(cfg, world, method)
    finally:
        Optimizer.step = step
    return kept


def assert_same_run(ours, theirs, gradients, expected, tolerance=1e-5):
    """The metrics, samples, gradients and weights of two runs."""
    assert_same_metrics(untimed_metrics(ours), untimed_metrics(theirs), tolerance)
    for file in ("samples.jsonl", "eval_samples.jsonl"):
        for a, b in zip(samples(ours, file), samples(theirs, file), strict=True):
            assert [a.get(key) for key in ("problem", "prompt", "token_ids", "reward")] == [
                b.get(key) for key in ("problem", "prompt", "token_ids", "reward")
            ]
    assert len(gradients) == len(expected) >= 3
    for a, b in zip(gradients, expected, strict=True):
        assert_same_weights(a, b, tolerance)
    assert_same_weights(final_weights(ours), final_weights(theirs), tolerance)


def luffy_train(cfg, desk, **fault):
    """``luffy train`` in processes of its own, with a fault in one worker (faults/injected); (exit code, standard error)."""
    recipe = desk / "recipe.yaml"
    recipe.write_text(to_yaml(cfg))
    paths = [
        TESTS / "faults" / "injected",
        TESTS / "faults",
        TESTS / "distributed",
        TESTS / "train",
        TESTS,
        TESTS.parent,
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    env |= {f"LUFFY_FAULT_{key}": str(value) for key, value in fault.items()}
    command = [sys.executable, "-m", "luffy", "train", str(recipe)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    return done.returncode, done.stderr
