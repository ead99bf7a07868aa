"""One step: the algorithm of docs/methods.md, line by line.

``rl_step`` and ``sft_step`` pause where something around the method has its place, and `take_step` is what surrounds
them:

    gated      the rollouts are made: with async.max_staleness a thread went so far ahead of time (prefetch.py)
    rejected   oversampling may draw more problems first (rejection.py)
    credited   the record looks at the samples before the weights change

Every rank goes through the same stages with its share of the problems. Whatever a step needs is in the run's state
(run_state.py).
"""

from __future__ import annotations

from collections.abc import Callable

from luffy.run_folder.timing import Stopwatch
from luffy.step.batch import StepBatch
from luffy.step.crediting import give_credit, score_traces
from luffy.step.draws import draw, draw_traces, plan
from luffy.step.gating import gate
from luffy.step.play import play
from luffy.step.rejection import reject, settle, wants_more
from luffy.step.run_state import Begun, Run, Stages
from luffy.step.update import remember, update

Observer = Callable[[StepBatch], None]


def rl_step(run: Run, batch: StepBatch) -> Stages:
    """One step of LUFFY, or as much of it as the caller asks for."""
    with batch.watch("plan"):
        drawn = draw(run, batch)
        planned = plan(run, drawn, batch.step)
    played = play(run, planned, batch)
    groups = gate(run, drawn, played, batch)
    yield "gated"
    reject(run, drawn, played, groups, batch)
    yield "rejected"
    give_credit(run, batch)
    remember(run, batch)
    yield "credited"
    update(run, batch)


def sft_step(run: Run, batch: StepBatch) -> Stages:
    """One step of SFT: a trace of each of the next problems."""
    with batch.watch("plan"):
        draw_traces(run, batch)
    score_traces(run, batch)
    remember(run, batch)
    yield "credited"
    update(run, batch)


def ignore(batch: StepBatch) -> None:
    """An observer that looks at nothing."""


def take_step(run: Run, step: int, observe: Observer = ignore) -> StepBatch:
    """Step number ``step``, from 0, with all that surrounds it. ``observe`` sees the samples before the weights
    change."""
    batch, stages = begin(run, step) if run.prefetcher is None else take_prefetched(run, step)
    pause: str | None = next(stages)
    while pause is not None:
        if pause == "rejected":
            if wants_more(run, batch):
                stages = rl_step(run, batch)
            else:
                settle(run, batch)
        elif pause == "credited":
            observe(batch)
        pause = next(stages, None)
    return batch


def begin(run: Run, step: int) -> Begun:
    """A step that has done nothing yet."""
    batch = StepBatch(step, step, run.watch, run.messages.count)
    if run.method == "rl":
        run.before_step(step)
    return batch, rl_step(run, batch) if run.method == "rl" else sft_step(run, batch)


def take_prefetched(run: Run, step: int) -> Begun:
    """A step whose rollouts a thread has made; the seconds of its phases become those of this step."""

    def make(step: int, version: int, check: Callable[[], None]) -> Begun:
        batch = StepBatch(step, run.engine.agree_on(version), Stopwatch(), lambda done, total: check())
        run.before_step(step)
        stages = rl_step(run, batch)
        next(stages)
        return batch, stages

    assert run.prefetcher is not None
    with run.watch("wait"):
        batch, stages = run.prefetcher.take(step, make)
    for phase, seconds in batch.watch.seconds.items():
        run.watch.seconds[phase] += seconds
    batch.watch, batch.progress = run.watch, run.messages.count
    return batch, stages
