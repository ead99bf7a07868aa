"""Steps whose responses differ in length: every response of the step ends in it, or none takes more than
`rollout.max_tokens_per_step` tokens of it."""

from __future__ import annotations

import gc
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench.limits import peak_gib, reset_peak
from bench.step import figures, one_step, responses, step_config, write_inputs

from luffy.guidance import Planner
from luffy.guidance.plan import extended
from luffy.metrics import Metric
from luffy.models.load import DTYPES, DtypeName
from luffy.models.machine import Machine
from luffy.rollout.engine import Engine, OnProgress
from luffy.rollout.native.native_engine import default_slots
from luffy.step.draws import draw_batch, plan
from luffy.step.memory import InFlight
from luffy.step.run_state import Run
from luffy.train.loop import Trainer
from luffy.types import Completion, Demonstration, Episode, Request, Task

FEW = 0.25  # waiting: fewer than this share of a step's own responses are under way


@dataclass(frozen=True)
class Lognormal:
    """Lengths of responses in tokens: from 1 to ``most``."""

    median: float
    sigma: float
    most: int

    def draw(self, seed: int) -> int:
        length = random.Random(seed).lognormvariate(math.log(self.median), self.sigma)
        return min(max(round(length), 1), self.most)


@dataclass(frozen=True, kw_only=True)
class LengthPlanner(Planner):
    """Every response ends at a length that is drawn by its seed: a random model knows no end of its own."""

    lengths: Lognormal

    def planned(self, task: Task, demonstration: Demonstration | None, prefix: int, seed: int) -> Episode:
        planned = super().planned(task, demonstration, prefix, seed)
        if planned.sampling is None:
            return planned
        return replace(planned, sampling=replace(planned.sampling, max_tokens=self.lengths.draw(seed)))


class WatchedEngine(Engine):
    """Notes when the responses of the last call ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ended: list[float] = []  # seconds since the call, in order

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        started, self.ended = time.perf_counter(), []

        def note(done: int, total: int) -> None:
            self.ended.append(time.perf_counter() - started)
            if progress is not None:
                progress(done, total)

        return self.engine.generate(requests, note)

    def sync(self, version: int) -> None:
        self.engine.sync(version)

    def metrics(self) -> dict[str, Metric]:
        return self.engine.metrics()

    def sleep(self) -> None:
        self.engine.sleep()


def waiting_seconds(ended: Sequence[float], few: float) -> float:
    """How long fewer than ``few`` responses were under way, where they ended at these times."""
    left = min(math.ceil(few) - 1, len(ended))
    return 0.0 if left <= 0 else ended[-1] - (ended[-left - 1] if left < len(ended) else 0.0)


def steady_state(run: Run, lengths: Lognormal) -> list[InFlight]:
    """What is in flight after many steps: of the problems drawn so many steps ago, those that are not finished. The
    tokens are random, as all of a random model."""
    most = run.cfg.rollout.max_tokens_per_step
    assert most is not None
    vocabulary = run.model.config.vocab_size

    def so_far(planned: Episode, age: int) -> Episode:
        if planned.sampling is None:
            return planned
        count = min(age * most, planned.sampling.max_tokens)
        ids, log_probs = torch.randint(3, vocabulary, (count,)), torch.full((count,), -math.log(vocabulary))
        return extended(planned, Completion(ids, log_probs, "length"), version=0, in_parts=True)

    found = []
    for age in range(math.ceil(lengths.most / most) - 1, 0, -1):
        drawn = draw_batch(run, -age, 0)
        for draw, group in zip(drawn, plan(run, drawn, -age), strict=True):
            found.append(InFlight.of(draw.row, draw.visit, -age, [so_far(planned, age) for planned in group]))
    return [problem for problem in found if problem.unfinished]


def bench_lengths(
    shape: str, dtype: DtypeName, device: str, problems: int, samples: int, prompt_tokens: int, lengths: Lognormal,
    most_per_step: Sequence[int | None], steps: int, overrides: dict[str, Any], warm_up: bool = True,
) -> tuple[Machine, list[dict[str, Any]]]:  # fmt: skip
    """A row of mean figures for each ``rollout.max_tokens_per_step``; with None every response ends in its step. Each
    is over ``steps`` steps, after one that warms up."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, shape, dtype, device, problems * (steps + 2), prompt_tokens)
        machine = Machine.measure(torch.device(device), DTYPES[dtype])
        for most in most_per_step:
            rollout = {"rollout": {"max_tokens_per_step": most}, "name": "whole" if most is None else "parts"}
            cfg = step_config(folder, problems, samples, lengths.most, dtype, device, overrides | rollout)
            with Trainer(cfg) as trainer:
                rows.append({"max_tokens_per_step": most} | _measure(trainer, machine, lengths, steps, warm_up))
            del trainer
            gc.collect()  # the weights of one are gone before the next is there
    return machine, rows


def _measure(trainer: Trainer, machine: Machine, lengths: Lognormal, steps: int, warm_up: bool) -> dict[str, Any]:
    run, device = trainer.run, trainer.run.policy.device
    run.planner = LengthPlanner(**vars(run.planner), lengths=lengths)
    watched = WatchedEngine(run.engine)
    run.engine = watched
    if run.cfg.rollout.max_tokens_per_step is not None:
        run.memory.in_flight = steady_state(run, lengths)
    slots = run.cfg.rollout.slots or default_slots(device.type)
    few = FEW * min(slots, run.cfg.batch.problems * run.cfg.rollout.n)
    measured = []
    with trainer.recording() as records:
        if warm_up:
            one_step(trainer, records, device)
        reset_peak(device)
        for _ in range(steps):
            seconds, batch, values = one_step(trainer, records, device)
            row = figures(trainer, responses(batch), machine, seconds, values)
            row |= {"waiting_seconds": waiting_seconds(watched.ended, few), "groups": batch.size}
            measured.append(row | {"oldest": values.get("rollout/age/max", 0.0)})
    return summary(measured) | {"peak_gib": peak_gib(device), "steps": measured}


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over steps; shares and speed are of all their seconds. The GPU is busy when it neither waits for the last
    responses nor for the host."""
    count, seconds = len(steps), sum(step["seconds"] for step in steps)
    waiting = sum(step["waiting_seconds"] for step in steps)
    outside = sum(step["outside"] * step["seconds"] for step in steps)
    phases = {name: sum(step["phases"].get(name, 0.0) for step in steps) / count for name in ("rollout", "update")}
    return {
        "seconds": seconds / count, **phases, "groups": sum(step["groups"] for step in steps) / count,
        "waiting_share": waiting / (count * phases["rollout"]), "gpu_busy_share": 1 - (waiting + outside) / seconds,
        "tokens_per_second": sum(step["update_tokens"] for step in steps) / seconds,
        "oldest": max(step["oldest"] for step in steps),
    }  # fmt: skip
