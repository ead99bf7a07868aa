"""What several fault injections need: a run of seconds, a process to hurt, and the comparison with an unhurt run."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainings import untimed_metrics

from luffy.run_folder import background_saver
from luffy.run_folder.checkpoint import CheckpointStore
from luffy.run_folder.recorder import read_json_lines


def full_config(make_config, sums, name, **more):
    """Six steps that use everything a checkpoint must carry: about a second of work."""
    return make_config(
        name=name,
        data={"eval": str(sums)},
        eval={"every": 2, "limit": 6},
        batch={"mini_batch": 3},
        guidance={"n_prefix": 2, "strategy": "random", "min_ratio": 0.2, "max_ratio": 1.0},
        optim={"lr": 5e-3, "schedule": "cosine"},
        train={"steps": 6, "save_every": 1, "keep": 2},
        **more,
    )


def left_behind(folder):
    """Names of all that is there when a run is over, less what a kill before the first checkpoint left; where ``latest`` points, and the best."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if ".earlier-" not in p.name)
    return names, os.readlink(folder / "checkpoints" / "latest"), (folder / "best.json").read_text()


def assert_all_equal(killed: Path, undisturbed: Path) -> None:
    assert untimed_metrics(killed) == untimed_metrics(undisturbed)
    for name in ("samples.jsonl", "eval_samples.jsonl"):
        assert read_json_lines(killed / name) == read_json_lines(undisturbed / name)
    assert left_behind(killed) == left_behind(undisturbed)
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(f / "checkpoints" / "step-000006" / name) for f in (killed, undisturbed))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)


def mounting(tmp_path):
    """For a fixture: ``mount(options)`` gives a tmpfs, gone after the test."""
    folders = []

    def mount(options):
        folder = tmp_path / f"disk-{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "luffy-faults", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot mount a small disk: {error}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk):
    with (disk / "ballast").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


def filling(disk, owner, name, call):
    """``owner.name`` fills the disk before its ``call``-th run, or after its ``-call``-th."""
    original, calls = getattr(owner, name), itertools.count(1)

    def full(*args, **kwargs):
        this = next(calls)
        if this == call:
            fill(disk)
        result = original(*args, **kwargs)
        if this == -call:
            fill(disk)
        return result

    setattr(owner, name, full)


def sharded_writes():
    """What a sharded run writes behind the training, and the call before which the disk fills."""
    return {
        "shards": (background_saver, "start_saving", 2),
        "weights": (background_saver.BackgroundSaver, "_complete", 2),
        "state.json": (CheckpointStore, "complete", 2),
    }
