"""Seconds and memory of the gradient check at the start of a sharded run, by the shape of the model.

    python benchmarks/gradient_check.py qwen2-7b

One process, so that what the check computes is timed and no transfer: with several, each weight is gathered four times
and each gradient reduced twice besides.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch
from bench.models import parameter_count, random_model

from luffy.config import Config
from luffy.distributed.replica import Replica
from luffy.distributed.world import join_world, leave_world
from luffy.learn.gradient_check import check_gradients
from luffy.learn.policy import Policy
from luffy.schema import build


def main(shape: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", TMPDIR=folder)
        world = join_world(device, 600)
        cfg = build(Config, {"model": {"path": shape, "device": device, "dtype": "bfloat16"}, "launch": "torchrun"})
        model = random_model(shape, "bfloat16", device)
        replica = Replica(model, device)
        size = parameter_count(model)
        policy = Policy(model, cfg, world=world)
        for attempt in ("first", "second"):
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            check_gradients(policy, replica.model)
            seconds = time.perf_counter() - started
            peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
            print(f"{shape} ({size / 1e9:.1f} B parameters), {attempt} check: {seconds:.2f} s, peak {peak:.0f} GiB")
        leave_world()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["qwen2-0.5b"]))
