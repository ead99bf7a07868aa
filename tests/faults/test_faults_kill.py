"""SIGKILL at 100 random moments: every training, killed as often as it may be, ends as the undisturbed one.

A training is started, killed, started again, until it comes to its end; then the next one begins, until there were
100 kills. Half of the kills fall anywhere, the others inside a phase that is over too soon to be hit by chance.
Another seed: LUFFY_FAULT_SEED=7 make test-faults.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from children import Child
from faults_support import assert_all_equal, full_config
from kill_timer import kill_this_process_after
from trainings import train, untimed_metrics

from luffy.learn.policy import Policy
from luffy.rewards.verifier import Verifier
from luffy.rollout.native import NativeEngine
from luffy.run_folder import recorder
from luffy.run_folder.checkpoint import CheckpointStore

KILLS = int(os.environ.get("LUFFY_FAULT_KILLS", "100"))
SEED = int(os.environ.get("LUFFY_FAULT_SEED", "0"))

PHASES = {
    "rollout": (NativeEngine, "generate"),
    "reward": (Verifier, "score"),
    "update": (Policy, "update"),
    "save": (CheckpointStore, "save"),
    "rotation": (CheckpointStore, "tidy"),
    "report": (recorder.JsonLinesWriter, "write"),
}
NAMES = list(PHASES)

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's timers are Linux's"),
]


class PhaseWatch:
    """Where a training is, in a file that outlives it; and the moment that ends it."""

    def __init__(self, file):
        """``file`` holds one byte: the number of the phase the process was in, 0: between phases."""
        with file.open("r+b") as opened:
            self.shared = mmap.mmap(opened.fileno(), 1)
        self.entries: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def install(self, target: str | None = None, entry: int = 0, delay: float = 0.0) -> None:
        """In this process, for good: note the phases, and die ``delay`` seconds after the ``entry``-th of ``target``."""
        self.shared[0] = 0
        for name, (owner, method) in PHASES.items():
            setattr(owner, method, self._watched(name, getattr(owner, method), target == name and entry, delay))

    def _watched(self, name, original, deadly_entry, delay):
        def call(*args, **kwargs):
            self.entries[name] += 1
            before, self.shared[0] = self.shared[0], NAMES.index(name) + 1
            started = time.perf_counter()
            if self.entries[name] == deadly_entry:
                kill_this_process_after(delay)
            try:
                return original(*args, **kwargs)
            finally:
                self.shared[0] = before
                self.seconds[name] += time.perf_counter() - started

        return call


def last_phase(file: Path) -> str:
    number = file.read_bytes()[0]
    return "between" if number == 0 else NAMES[number - 1]


def measured_undisturbed(cfg, file):
    """Train in this process; seconds of CPU in all, then entries and seconds by phase."""
    watch = PhaseWatch(file)
    watch.install()
    began = time.process_time()
    train(cfg)
    return time.process_time() - began, watch.entries, watch.seconds


def attempt(cfg, file, kind, moment, delay):
    """Train, and be killed ``delay`` seconds after the ``moment``-th entry of ``kind``, or anywhere, or not at all."""
    PhaseWatch(file).install(kind, moment, delay)
    if kind is None and delay is not None:
        kill_this_process_after(delay, time.CLOCK_PROCESS_CPUTIME_ID)
    train(cfg)


def assert_nothing_partial(folder: Path, truth: list[dict]) -> None:
    """Whatever has its final name is whole, and is the undisturbed run's."""
    for checkpoint in CheckpointStore(folder / "checkpoints", keep=2):
        checkpoint.verify()
        assert checkpoint.state()["progress"]["step"] == checkpoint.step
    for name, parse in {"config.yaml": yaml.safe_load, "data.json": json.loads, "best.json": json.loads}.items():
        if (folder / name).exists():
            assert parse((folder / name).read_text())
    rows = untimed_metrics(folder)
    assert rows == truth[: len(rows)]


@pytest.mark.timeout(3600)
def test_a_training_killed_anywhere_ends_as_the_undisturbed_one(make_config, sums, tmp_path):
    torch.set_num_threads(1)
    dice = random.Random(SEED)
    undisturbed = full_config(make_config, sums, "undisturbed")
    phase = tmp_path / "phase"
    phase.write_bytes(b"\0")
    child = Child()
    child.start(measured_undisturbed, undisturbed, phase)
    cpu_s, entries, seconds = child.result()
    child.end()
    child = Child()
    moments = itertools.cycle([moment for name in NAMES for moment in (None, name)])
    truth = untimed_metrics(undisturbed.folder)
    killed_in: Counter[str] = Counter()
    resumed = finished = kills_of_this_run = 0
    cfg = full_config(make_config, sums, "killed-0")
    while killed_in.total() < KILLS or kills_of_this_run:
        last_try = killed_in.total() >= KILLS
        kind = None if last_try else next(moments)
        moment = dice.randint(1, 1 + entries[kind] // 3) if kind else 0  # a resumed training has fewer
        delay = None if last_try else dice.uniform(0, seconds[kind] / entries[kind] if kind else cpu_s)
        child.start(attempt, cfg, phase, kind, moment, delay)
        following = Child()  # imports meanwhile
        code, child = child.exit_code(), following
        resumed += kills_of_this_run > 0
        if code < 0:
            assert code == -signal.SIGKILL
            killed_in[last_phase(phase)] += 1
            kills_of_this_run += 1
            assert_nothing_partial(cfg.folder, truth)
        else:
            assert code == 0, f"seed {SEED}: the attempt after {kills_of_this_run} kills of {cfg.name} failed"
            assert_all_equal(cfg.folder, undisturbed.folder)
            finished, kills_of_this_run = finished + 1, 0
            cfg = full_config(make_config, sums, f"killed-{finished}")
    child.end()
    print(f"\n{killed_in.total()} kills {dict(killed_in)}, {resumed} resumes, {finished} trainings compared")
    assert set(killed_in) >= set(NAMES), f"a phase was never hit: {dict(killed_in)}"
