"""The end of a step: the run takes it in, and the optimizer makes its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from luffy.errors import TrainingStopped
from luffy.learn.optim import lr_at
from luffy.learn.policy import NonFiniteUpdate
from luffy.metrics import Max, Metric, Sum, merge_metrics
from luffy.step.batch import StepBatch
from luffy.step.crediting import with_reference
from luffy.step.draws import lessons
from luffy.step.run_state import Run
from luffy.step.sample_rows import write_bad_step


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
