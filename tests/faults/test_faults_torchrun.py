"""Sharded runs as `launch=torchrun` starts them: a worker that is killed, and a disk that fills behind the training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults_support import mounting
from features import note_seen
from ranks import luffy_train, run_ranks
from trainings import final_weights, samples, train, untimed_metrics

from luffy.config import to_yaml
from luffy.run_folder.checkpoint import CheckpointStore

TESTS = Path(__file__).parent.parent
pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
mounted = pytest.fixture(mounting)


def sharded(make_config, name, **more):
    return make_config(
        name=name,
        launch="torchrun",
        parallel={"workers": 2, "timeout_s": 120},
        batch={"mini_batch": 3},
        train={"steps": 6, "save_every": 2, "keep": 5},
        **more,
    )


@pytest.fixture(scope="module")
def undisturbed():
    """The undisturbed run, made once."""
    return {}


def expected_run(undisturbed, make_config):
    if not undisturbed:
        cfg = sharded(make_config, "undisturbed")
        run_ranks(2, train, cfg)
        undisturbed.update(figures=untimed_metrics(cfg), samples=samples(cfg), weights=final_weights(cfg))
    return undisturbed


def assert_as_expected(cfg, truth):
    assert untimed_metrics(cfg) == truth["figures"] and samples(cfg) == truth["samples"]
    ours = final_weights(cfg)
    assert all(torch.equal(ours[name], tensor) for name, tensor in truth["weights"].items())


@pytest.mark.parametrize(("moment", "victim"), [("update", 1), ("update", 0), ("rollout", 1)])
def test_a_killed_worker_ends_the_command_with_one_line_and_it_resumes(
    make_config, tmp_path, undisturbed, moment, victim
):
    truth = expected_run(undisturbed, make_config)
    cfg = sharded(make_config, "killed")
    folder = cfg.folder / "checkpoints"
    code, said = luffy_train(cfg, tmp_path, RANK=victim, DIES_IN=moment, CHECKPOINTS=folder)
    ended = time.time()
    assert (folder / "died").exists(), said
    assert (code, said.count("luffy: error: "), "Traceback" in said) == (1, 1, False), said
    assert said.splitlines()[-1].startswith(f"luffy: error: process {victim} of 2 was ended by SIGKILL"), said
    assert ended - (folder / "died").stat().st_mtime < 100  # nobody waited for the dead one: parallel.timeout_s is 120
    assert untimed_metrics(cfg) == truth["figures"][: len(untimed_metrics(cfg))] and len(untimed_metrics(cfg)) < 6
    (folder / "died").unlink()
    code, said = luffy_train(cfg, tmp_path)
    assert code == 0 and "resumed at step" in said, said
    assert_as_expected(cfg, truth)
    note_seen("one process killed, then resumed", "torchrun, gloo", "2")


@pytest.mark.parametrize(("write", "rank"), [("shards", 1), ("weights", 0), ("state.json", 0)])
def test_a_disk_that_fills_behind_the_training_costs_no_checkpoint(
    make_config, mounted, tmp_path, undisturbed, write, rank
):
    truth = expected_run(undisturbed, make_config)
    disk = mounted("size=12m")
    cfg = sharded(make_config, "full")
    cfg.folder.mkdir(parents=True)
    (cfg.folder / "checkpoints").symlink_to(disk)  # the records go on: nothing else can fail first
    code, said = luffy_train(cfg, tmp_path, RANK=rank, FILLS=disk, WRITE=write)
    assert (disk / "ballast").exists(), f"the moment never came\n{said}"
    assert (code, said.count("luffy: error: "), "Traceback" in said) == (1, 1, False), said
    (line,) = [line for line in said.splitlines() if line.startswith("luffy: error: ")]
    assert "stopped at step 4: its checkpoint cannot be written" in line and "No space left on device" in line, said
    store = CheckpointStore(cfg.folder / "checkpoints", 5)
    assert [checkpoint.step for checkpoint in store] == [2]
    next(iter(store)).verify()
    (disk / "ballast").unlink()
    code, said = luffy_train(cfg, tmp_path)
    assert code == 0 and "resumed at step 2" in said, said
    assert_as_expected(cfg, truth)


def test_sigterm_to_the_command_ends_it_with_one_line(make_config, tmp_path):
    cfg = sharded(make_config, "ended")
    cfg = replace(cfg, train=replace(cfg.train, steps=1000))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(cfg))
    env = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "luffy", "train", str(recipe)]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as running:
        latest, deadline = cfg.folder / "checkpoints" / "latest", time.time() + 120
        while not latest.exists() and time.time() < deadline:
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=90)
    assert (running.returncode, said.count("luffy: error: "), "Traceback" in said) == (1, 1, False), said
    assert "ended by SIGTERM, and its 2 processes with it" in said.splitlines()[-1]
