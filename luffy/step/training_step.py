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

from collections.abc import Callable, Iterator
from functools import partial

from luffy.errors import TrainingStopped
from luffy.learn.optim import lr_at
from luffy.learn.policy import NonFiniteUpdate
from luffy.metrics import Max, Metric, Sum, merge_metrics
from luffy.run_folder.timing import Stopwatch
from luffy.step.crediting import give_credit, score_traces, with_reference
from luffy.step.draws import draw, draw_traces, lessons, plan
from luffy.step.gating import gate
from luffy.step.play import play
from luffy.step.rejection import reject, settle, wants_more
from luffy.step.run_state import Begun, Run, Stages, StepBatch
from luffy.step.sample_rows import write_bad_step

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


def remember(run: Run, batch: StepBatch) -> None:
    """Take the step into the run's state. From here on it counts: a stop before leaves position and memory as they
    were."""
    memory = run.memory
    if memory.replay is not None:
        run.policy.remove_clip(run.cfg.algorithm.remove_clip and memory.replay.begun)
    run.data_position, memory.in_flight = batch.sampler, batch.in_flight
    run.progress.step += 1
    run.progress.problems += run.cfg.batch.problems
    memory.remember(batch.attempts)
    batch.lessons = lessons(run)


def update(run: Run, batch: StepBatch) -> None:
    """One optimizer step per mini-batch, then the engines get the new weights. Adds the metrics to the batch's."""
    parts = [batch.metrics]
    with batch.watch("update"):
        for make in updates(run, batch, lr_at(batch.step, run.total_steps, run.cfg.optim)):
            try:
                parts += [make(), {"train/updates": Sum(1)}]
                run.progress.bad_in_a_row = 0
            except NonFiniteUpdate as error:
                parts.append(skip_update(run, batch, error))
        if run.teacher is not None:
            run.teacher.follow()
    with batch.watch("sync"):
        run.sync(batch.step + 1)
    batch.metrics = merge_metrics(parts)


def updates(run: Run, batch: StepBatch, lr: float) -> Iterator[Callable[[], dict[str, Metric]]]:
    """The optimizer steps on a batch: one per mini-batch, then the SFT steps by an optimizer of their own."""
    for mini in batch.mini_batches(run.cfg.batch.updates):
        yield partial(run.policy.update, mini, lr)
    for traces in batch.lessons:
        yield partial(run.policy.sft_update, with_reference(run, traces))


def skip_update(run: Run, batch: StepBatch, error: NonFiniteUpdate) -> dict[str, Metric]:
    """Count an update that was not finite and keep the step's samples; stop when it happens too often in a row."""
    progress = run.progress
    progress.bad_in_a_row += 1
    progress.bad_updates += 1
    dump = write_bad_step(run, batch)
    run.messages.warn(f"step {progress.step}: update skipped, {error}; samples in {dump}")
    if progress.bad_in_a_row >= run.cfg.train.max_bad_steps:
        raise TrainingStopped(
            f"stopped at step {progress.step}: {progress.bad_in_a_row} updates in a row were not finite "
            f"(last: {error}); look at {dump}, lower optim.lr, or resume from {run.cfg.folder / 'checkpoints'}"
        )
    return {"train/skipped_updates": Sum(1), "train/skipped_in_all": Max(progress.bad_updates)}
