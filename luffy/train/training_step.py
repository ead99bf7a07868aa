"""One step: the algorithm of docs/methods.md, line by line.

Ranks, oversampling and prefetched rollouts surround it (batch.py, prefetch.py). Whatever a step needs is in the run's
state (run_state.py).
"""

from __future__ import annotations

from collections.abc import Callable

from luffy.errors import TrainingStopped
from luffy.metrics import Max, Metric, Sum, merge_metrics
from luffy.train import recording
from luffy.train.batch import BatchRequest, StepBatch, collect, draw_traces, score_tokens, updates
from luffy.train.credit import credit, credit_metrics
from luffy.train.draws import draw_share, lessons
from luffy.train.optim import lr_at
from luffy.train.partial_rollouts import roll_out_in_parts
from luffy.train.policy import NonFiniteUpdate
from luffy.train.rounds import further_rounds, respond
from luffy.train.run_state import RolloutBatch, Run

Observer = Callable[[StepBatch], None]


def ignore(batch: StepBatch) -> None:
    """An observer that looks at nothing."""


def roll_out(run: Run, at: BatchRequest) -> RolloutBatch:
    """The first half of an RL step: sample problems, plan, generate, verify, and again where the gate asks for it. With
    ``async.max_staleness`` a thread does this for coming steps; it must not depend on anything but the run and
    ``at``."""
    run.before_step(at.step)
    with at.watch("plan"):
        drawn = draw_share(run, at.step, at.first)
        plan = drawn.plan(run, at.step)
    groups = first = respond(run, plan, at)
    metrics = drawn.metrics(run, at.step)
    if run.gate is not None:
        groups, more = further_rounds(run, run.gate, drawn, first, at)
        metrics |= more
    return RolloutBatch(
        groups=dict(zip(drawn.positions, groups, strict=True)),
        draws=dict(zip(drawn.positions, drawn.draws, strict=True)),
        sampler=run.sampler.state_dict(),
        first=first,
        metrics=metrics,
    )


def rl_step(run: Run, step: int, observe: Observer = ignore) -> StepBatch:
    """One step of LUFFY; ``step`` counts from 0. ``observe`` sees the samples before the weights change."""
    in_parts = run.cfg.rollout.max_tokens_per_step is not None
    batch = collect(run, step, roll_out_in_parts if in_parts else roll_out)  # and reject groups without a signal
    if run.prefetcher is None:
        with run.watch("sleep"):
            run.engine.sleep()
    with run.watch("old_log_probs"):
        tokens = score_tokens(run, batch)
    with run.watch("advantage"):
        settings = (run.cfg.algorithm, step, run.total_steps)
        samples = credit(list(batch.groups.values()), tokens, *settings)
    batch.add(samples, credit_metrics(samples, tokens, *settings), run.world)
    return update(run, step, batch, observe)


def sft_step(run: Run, step: int, observe: Observer = ignore) -> StepBatch:
    """One step of SFT: a trace of each of the next problems."""
    with run.watch("plan"):
        batch = draw_traces(run)
    return update(run, step, batch, observe)


def update(run: Run, step: int, batch: StepBatch, observe: Observer = ignore) -> StepBatch:
    """One optimizer step per mini-batch, then the engines get the new weights. Adds the metrics to the batch's.
    From here on the step counts: a stop before leaves position and memory where it began."""
    lr = lr_at(step, run.total_steps, run.cfg.optim)
    run.progress.step, run.data_position, run.memory.under_way = step + 1, batch.sampler, batch.under_way
    run.progress.problems += run.cfg.batch.problems
    run.memory.remember(batch.attempts)
    batch.lessons = lessons(run)
    observe(batch)
    parts = [batch.metrics]
    with run.watch("update"):
        for make in updates(run, batch, lr):
            try:
                parts += [make(), {"train/updates": Sum(1)}]
                run.progress.bad_in_a_row = 0
            except NonFiniteUpdate as error:
                parts.append(skip_update(run, batch, error))
        if run.teacher is not None:
            run.teacher.follow()
    with run.watch("sync"):
        run.sync(run.progress.step)
    batch.metrics = merge_metrics(parts)
    return batch


def skip_update(run: Run, batch: StepBatch, error: NonFiniteUpdate) -> dict[str, Metric]:
    """Count an update that was not finite and keep the step's samples; stop when it happens too often in a row."""
    progress = run.progress
    progress.bad_in_a_row += 1
    progress.bad_updates += 1
    dump = recording.write_bad_step(run, batch)
    run.messages.warn(f"step {progress.step}: update skipped, {error}; samples in {dump}")
    if progress.bad_in_a_row >= run.cfg.train.max_bad_steps:
        raise TrainingStopped(
            f"stopped at step {progress.step}: {progress.bad_in_a_row} updates in a row were not finite "
            f"(last: {error}); look at {dump}, lower optim.lr, or resume from {run.store.folder}"
        )
    return {"train/skipped_updates": Sum(1), "train/skipped_in_all": Max(progress.bad_updates)}
