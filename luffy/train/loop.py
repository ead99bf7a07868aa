"""The training loop: what a step does, and what happens between steps.

``rl_step`` and ``sft_step`` are the algorithm (docs/methods.md). Ranks, oversampling and prefetched rollouts surround
it (batch.py, prefetch.py). ``Trainer`` makes steps, and between them evaluates, records and saves. Whatever a step
needs is in the run's state (run_state.py), and what a killed run needs to go on is in its checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from luffy.config import Config, EvalConfig
from luffy.distributed.world import World
from luffy.errors import AllStopped, TrainingStopped
from luffy.metrics import Max, Metric, Sum, merge_metrics
from luffy.models.threads import use_threads
from luffy.report.console import was_idle
from luffy.train import held_out, recording, saving
from luffy.train.activations import out_of_memory_advice
from luffy.train.batch import Slot, StepBatch, collect, draw_traces, score_tokens, updates
from luffy.train.build import build_run
from luffy.train.credit import credit, credit_metrics
from luffy.train.draws import draw_share
from luffy.train.optim import lr_at
from luffy.train.policy import NonFiniteUpdate
from luffy.train.recording import Records
from luffy.train.rounds import further_rounds, respond
from luffy.train.run_state import Method, Progress, RolloutBatch, Run
from luffy.train.stopping import StopRequest

Observer = Callable[[StepBatch], None]


def ignore(batch: StepBatch) -> None:
    """An observer that looks at nothing."""


def roll_out(run: Run, at: Slot) -> RolloutBatch:
    """The first half of an RL step: sample problems, plan, generate, verify, and again where the gate asks for it. With
    ``async.max_staleness`` a thread does this for coming steps; it must not depend on anything but the run and the
    slot."""
    run.before_step(at.step)
    with at.watch("plan"):
        drawn = draw_share(run, at.step, at.first)
        plan = drawn.plan(run, at.step)
    groups = first = respond(run, plan, at)
    metrics = drawn.metrics(run, at.step)
    if run.gate is not None:
        groups, more = further_rounds(run, run.gate, drawn, first, at)
        metrics |= more
    by_position = dict(zip(drawn.positions, groups, strict=True))
    return RolloutBatch(by_position, drawn.sources, run.sampler.state_dict(), first, metrics)


def rl_step(run: Run, step: int, observe: Observer = ignore) -> StepBatch:
    """One step of LUFFY; ``step`` counts from 0. ``observe`` sees the samples before the weights change."""
    batch = collect(run, step, roll_out)  # and reject groups without a signal
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
    run.data_position = run.sampler.state_dict()
    return update(run, step, batch, observe)


def update(run: Run, step: int, batch: StepBatch, observe: Observer = ignore) -> StepBatch:
    """One optimizer step per mini-batch, then the engines get the new weights. Adds the metrics to the batch's."""
    lr = lr_at(step, run.total_steps, run.cfg.optim)
    run.progress.step = step + 1
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


class Trainer:
    """A training in this process: ``train()`` to its end, or step by step.

        with Trainer(cfg) as trainer:
            for step, metrics in trainer.steps():
                print(step, metrics["critic/rewards/mean"])

    ``resume``: auto (the newest checkpoint of the run folder, if any), never, or the folder of a checkpoint. In a
    ``world`` of several processes each has a Trainer, and all must make the same calls.
    """

    def __init__(
        self,
        cfg: Config,
        method: Method = "rl",
        resume: str = "auto",
        allow_changed_data: bool = False,
        world: World | None = None,
        on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
        console: Console | None = None,
    ) -> None:
        use_threads(cfg.train.threads)
        self.on_step, self.console = on_step, console
        self._stop = StopRequest(world or World())
        self.run = build_run(cfg, method, world or World(), resume, allow_changed_data)

    @property
    def cfg(self) -> Config:
        return self.run.cfg

    @property
    def progress(self) -> Progress:
        return self.run.progress

    @property
    def model(self) -> Any:
        return self.run.model

    @property
    def notices(self) -> list[str]:
        """Warnings from before the first step."""
        return self.run.messages.notices

    @property
    def is_finished(self) -> bool:
        return self.run.is_finished

    def lacks_evaluation(self) -> bool:
        """Whether the evaluation due at this step is not on record: before the first step, or after a stop in it."""
        return held_out.is_missing(self.run)

    def train(self) -> Path:
        """Run to the last step; ``on_step`` gets every step's number and metrics. Returns the model folder of the
        newest checkpoint."""
        with closing(self.steps()) as steps:
            for step, values in steps:
                self.on_step(step, values)
        return self.run.world.on_main(lambda: saving.newest_model(self.run))

    def steps(self) -> Generator[tuple[int, dict[str, float]], None, None]:
        """Make the steps that are left, with their evaluations and checkpoints; yields the number of each and its
        metrics. Leaving the loop early loses what was learnt since the last checkpoint; ``stop_soon`` does not."""
        if self.is_finished and not self.lacks_evaluation():
            return
        with self.recording() as records, self._stop.by_signals():
            try:
                yield from self._steps(records)
            except torch.OutOfMemoryError as error:
                raise TrainingStopped(f"stopped: {out_of_memory_advice(error, self.cfg)}") from error

    @contextmanager
    def recording(self) -> Iterator[Records]:
        """Open the run's record; evaluations after the last finished step are not on it any more."""
        records = Records(self.run, self.console)
        try:
            held_out.write_evaluated(self.run)
            yield records
        finally:
            records.close()

    def _steps(self, records: Records) -> Iterator[tuple[int, dict[str, float]]]:
        run = self.run
        if self.lacks_evaluation():
            self._make_up_for_evaluation(records)
        first, idle = run.progress.step, 0
        while not run.is_finished:
            values = self._step_and_after(records)
            idle += was_idle(values)
            yield run.progress.step, values
            if run.saver is not None:
                run.saver.poll()
            if self._stop.reason is not None and (not run.is_finished or self.lacks_evaluation()):
                saving.save_if_new(run)
                raise self._stop.error(run.progress.step)
        self._stop.reason = None  # it came too late to end anything
        recording.warn_if_mostly_idle(run, idle, run.progress.step - first)
        if run.saver is not None:
            run.saver.finish()

    def _step_and_after(self, records: Records) -> dict[str, float]:
        """A step, its evaluation, its record and its checkpoint, where they are due."""
        run, started = self.run, time.perf_counter()
        metrics = self.step(records).metrics
        speed = recording.throughput(metrics, time.perf_counter() - started)
        step = run.progress.step
        if run.eval_tasks and run.is_due(step, run.cfg.eval.every):
            metrics |= self._evaluate_or_save(records, metrics, speed)
        values = records.log(metrics, speed)
        held_out.note(run, values)
        if held_out.note_best(run) or run.is_due(step, run.cfg.train.save_every):
            with run.watch("save"):
                saving.save(run)
        return values

    def step(self, records: Records | None = None) -> StepBatch:
        """One rollout batch (or batch of traces) and its optimizer steps; nothing is evaluated or saved."""
        run, step = self.run, self.run.progress.step
        rows: recording.Rows = []
        observe = ignore if records is None else lambda batch: rows.extend(records.rows_of(batch))
        try:
            batch = (rl_step if run.method == "rl" else sft_step)(run, step, observe)
        except TrainingStopped as stop:
            if run.progress.step == step:  # no update was made: the run can go on from the step before
                run.rewind()
                if run.world.size == 1 or isinstance(stop, AllStopped):  # a checkpoint needs all processes
                    saving.save_if_new(run)
            raise
        if records is not None:
            records.recorder.write_samples(rows)
        return batch

    def _make_up_for_evaluation(self, records: Records) -> None:
        run = self.run
        try:
            metrics = self.evaluate(records=records)
        except held_out.EvaluationInterrupted:
            raise self._stop.error(run.progress.step) from None
        held_out.note(run, records.log_evaluation(metrics))
        if run.world.on_main(lambda: saving.is_saved(run)) and held_out.note_best(run):
            run.world.on_main(lambda: saving.tidy(run))

    def _evaluate_or_save(
        self, records: Records, metrics: Mapping[str, Metric], speed: Mapping[str, float]
    ) -> dict[str, Metric]:
        """An evaluation that fails must not cost the steps before it. (Of several processes it fails on one, and
        a checkpoint needs all.)"""
        try:
            return self.evaluate(records=records)
        except held_out.EvaluationInterrupted:
            return {}
        except Exception:
            if self.run.world.size == 1:
                records.log(metrics, speed)
                saving.save_if_new(self.run)
            raise

    def evaluate(self, cfg: EvalConfig | None = None, records: Records | None = None) -> dict[str, Metric]:
        """The policy as it is now on every held-out set; ``cfg`` instead of the run's own settings."""
        rows: recording.Rows = []
        seen = None if records is None else lambda name, groups: rows.extend(records.rows_of_evaluation(name, groups))
        metrics = held_out.evaluate(self.run, cfg, check=self._stop.interrupt_evaluation, seen=seen)
        if records is not None:
            records.recorder.write_eval_samples(rows)
        return metrics

    def stop_soon(self, reason: str) -> None:
        """End after the step under way, with a checkpoint of it; an evaluation waits until the run goes on. In a world
        of several every process must be told in the same step: a checkpoint needs all."""
        self._stop.reason = reason

    def close(self) -> None:
        """End the engine, the verifier and what is still being saved, and let go of the run folder."""
        self.run.closing.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
