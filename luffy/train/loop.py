"""The training loop: steps (step/training_step.py), and between them evaluations, records and checkpoints.

What a killed run needs to resume is in its checkpoints.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from luffy.config import Config, EvalConfig, Method
from luffy.distributed.world import World
from luffy.errors import AllStopped, Interrupted, StopRequested, TrainingStopped, UserError
from luffy.learn.activations import out_of_memory_advice
from luffy.metrics import Metric
from luffy.run_folder.console import setting_up, was_idle
from luffy.run_folder.saved_state import Progress
from luffy.run_folder.stages import Span
from luffy.step.run_state import StepBatch
from luffy.step.training_step import ignore, take_step
from luffy.train.build import build
from luffy.train.recording import Records, Rows, idle_notice, throughput

CTRL_C = "Ctrl-C"


class EvaluationInterrupted(Exception):
    """The run was asked to stop; the evaluation is deferred to its resume."""


class Trainer:
    """A training in this process: ``train()`` to its end, or ``steps()`` one by one.

    ``resume``: auto (newest checkpoint of the run folder, if any), never, or a checkpoint's folder. In a ``world`` of
    several processes each has a Trainer; all must make the same calls.
    """

    on_save: Callable[[Path], None] = staticmethod(lambda folder: None)  # gets the folder of every new checkpoint

    def __init__(
        self,
        cfg: Config,
        method: Method = "rl",
        resume: str = "auto",
        allow_changed_data: bool = False,
        world: World | None = None,
        on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
        console: Console | None = None,
        span: Span | None = None,
    ) -> None:
        if cfg.stages and span is None:
            raise UserError("this config has stages: train it with luffy train, or api.train_stages")
        self.on_step, self.console = on_step, console
        world = world or World()
        with setting_up(cfg.name, console, world.is_main) as announce:
            built = build(cfg, method, world, resume, allow_changed_data, announce, self.on_save, span)
        self.run, self.held_out, self.saver, self.start, self._closing, self._end = built
        self._stop = StopRequest(world)

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
        """Whether the evaluation due at this step is missing: before the first step, or after a stop in it."""
        step = self.progress.step
        return self.held_out.lacks(step) and self.run.is_due(step, self.cfg.eval.every)

    def train(self) -> Path:
        """Run to the last step; ``on_step`` gets every step's number and metrics. Returns the model folder of the
        newest checkpoint."""
        with closing(self.steps()) as steps:
            for step, values in steps:
                self.on_step(step, values)
        return self.run.world.on_main(self._newest_model)

    def _newest_model(self) -> Path:
        newest = next(iter(self.saver.store), None)
        if newest is None:
            longer = f"raise {self.length_setting} to go on from the other run"
            raise UserError(f"{self.cfg.folder} has no checkpoint of its own; {longer}")
        return newest.model

    @property
    def length_setting(self) -> str:
        """The setting that says how long the training is."""
        return "train.epochs" if self.cfg.train.steps is None else "train.steps"

    def steps(self) -> Generator[tuple[int, dict[str, float]], None, None]:
        """Run the remaining steps with their evaluations and checkpoints; yields the number and metrics of each.
        Leaving the loop early loses the steps since the last checkpoint; ``stop_soon`` does not."""
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
        records = Records(self.run, self.start, self.console)
        try:
            self.held_out.write()
            yield records
        finally:
            records.close()

    def _steps(self, records: Records) -> Iterator[tuple[int, dict[str, float]]]:
        run = self.run
        if self.lacks_evaluation():
            self._evaluate_deferred(records)
        first, idle = run.progress.step, 0
        while not run.is_finished:
            values = self._step_and_after(records)
            idle += was_idle(values)
            yield run.progress.step, values
            self.saver.poll()
            if self._stop.reason is not None and (not run.is_finished or self.lacks_evaluation()):
                self.save_if_new()
                raise self._stop.error(run.progress.step)
        self._stop.reason = None  # it came too late to end anything
        for notice in idle_notice(idle, run.progress.step - first):
            run.messages.warn(notice)
        self.saver.finish()

    def _step_and_after(self, records: Records) -> dict[str, float]:
        """A step, its evaluation, its record and its checkpoint, where they are due."""
        run, started, before = self.run, time.perf_counter(), self.run.progress.step
        try:
            metrics = self.step(records).metrics
        except Exception as error:
            if run.progress.step == before and self._is_everywhere(error):  # else the weights may be half-way
                self._save_finished_steps()
            raise
        speed = throughput(metrics, time.perf_counter() - started)
        step = run.progress.step
        if self._end is not None and self._end.is_out_of_time(speed["timing_s/step"]):
            self._end_stage("seconds")
        if self.held_out.is_there and run.is_due(step, run.cfg.eval.every):
            metrics |= self._evaluate_or_save(records, metrics, speed)
        values = records.log(metrics, speed)
        self._note_evaluation(step, values)
        if self._note_best() or run.is_due(step, run.cfg.train.save_every):
            with run.watch("save"):
                self.saver.save(run.progress)
        return values

    def _note_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Keep the scores of a step, and end its stage if they no longer improve."""
        self.held_out.note(step, values)
        if self._end is not None:
            self._end.note(step, values)
            if step in self.held_out.evaluated and self._end.is_flat(self.held_out.evaluated):
                self._end_stage(self._end.knobs.until)

    def _end_stage(self, reason: str) -> None:
        """Make this step the last of the stage, which is on record before its checkpoint is."""
        assert self._end is not None
        if not self.is_finished:
            self._end.decide(self.progress.step, reason)
            self.run.ended_at = self.progress.step

    def step(self, records: Records | None = None) -> StepBatch:
        """One rollout batch (or batch of traces) and its optimizer steps; nothing is evaluated or saved."""
        run, step = self.run, self.run.progress.step
        run.seed_dropout(step - run.first)
        rows: Rows = []
        observe = ignore if records is None else lambda batch: rows.extend(records.rows_of(batch))
        try:
            batch = take_step(run, step - run.first, observe)
        except Exception:
            if run.progress.step == step:  # no update was made: the run can go on from the step before
                run.rewind()
            raise
        if records is not None:
            records.write_samples(rows)
            records.garbage.freeze()
        return batch

    def _is_everywhere(self, error: Exception) -> bool:
        """Whether all processes have this error: a record and a checkpoint need all."""
        return self.run.world.size == 1 or isinstance(error, AllStopped)

    def save_if_new(self) -> None:
        """Save the last finished step, unless there is a checkpoint of it."""
        self.saver.finish()  # what is still being written counts
        progress = self.progress
        if progress.step > 0 and not self.run.world.on_main(lambda: self.saver.has(progress.step)):
            self.saver.save(progress)

    def _save_finished_steps(self) -> None:
        """Save the steps before an error. If saving fails too, the first error is still the one that is raised."""
        try:
            self.save_if_new()
        except Exception as second:
            self.run.messages.warn(f"no checkpoint of step {self.progress.step}: {type(second).__name__}: {second}")

    def _note_best(self) -> bool:
        """Whether the last step is the best so far (`train.keep_best`); the progress then says so."""
        accuracy = self.held_out.evaluated.get(self.progress.step)
        return self.cfg.train.keep_best and self.progress.note_best(accuracy)

    def _evaluate_deferred(self, records: Records) -> None:
        run, step = self.run, self.progress.step
        try:
            metrics = self.evaluate(records=records)
        except EvaluationInterrupted:
            raise self._stop.error(step) from None
        self._note_evaluation(step, records.log_evaluation(metrics))
        if run.world.on_main(lambda: self.saver.has(step)) and self._note_best():
            run.world.on_main(lambda: self.saver.tidy(run.progress))

    def _evaluate_or_save(
        self, records: Records, metrics: Mapping[str, Metric], speed: Mapping[str, float]
    ) -> dict[str, Metric]:
        """The metrics of an evaluation; where it fails, its step is recorded and saved."""
        try:
            return self.evaluate(records=records)
        except EvaluationInterrupted:
            return {}
        except Exception as error:
            if self._is_everywhere(error):
                records.log(metrics, speed)
                self._save_finished_steps()
            raise

    def evaluate(self, cfg: EvalConfig | None = None, records: Records | None = None) -> dict[str, Metric]:
        """The policy as it is now on every held-out set; ``cfg`` instead of the run's own settings."""
        rows: Rows = []
        seen = None if records is None else lambda name, groups: rows.extend(records.rows_of_evaluation(name, groups))

        def count(done: int, total: int) -> None:
            self._stop.interrupt_evaluation()
            self.run.messages.count(done, total)

        with self.run.watch("eval"):
            metrics = self.held_out.evaluate(self.progress.step, cfg, count, seen)
        if records is not None:
            records.write_samples(rows, held_out=True)
        return metrics

    def stop_soon(self, reason: str) -> None:
        """Finish the current step, save and stop; a due evaluation runs after resuming. Call it on every rank in the
        same step."""
        self._stop.reason = reason

    def close(self) -> None:
        """Shut down engine and verifier, finish saving, release the run folder."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class StopRequest:
    """A request to stop after the current step, by a signal or by the trainer's user; ``reason`` is None before it."""

    world: World
    reason: str | None = None

    def error(self, step: int) -> StopRequested:
        kind = Interrupted if self.reason == CTRL_C else StopRequested
        return kind(f"stopped at step {step} by {self.reason}; the same command goes on there")

    def interrupt_evaluation(self) -> None:
        """Raise EvaluationInterrupted after a request; several processes must finish an evaluation together."""
        if self.reason is not None and not self.world.joined:
            raise EvaluationInterrupted

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Take SIGTERM, which schedulers send before they kill, and Ctrl-C as requests; a second Ctrl-C ends the run at
        once. Several processes do not see a signal at the same step: it ends them at once, and the last checkpoint
        counts."""
        if self.world.joined or threading.current_thread() is not threading.main_thread():
            yield
            return

        def terminated(*_: object) -> None:
            self.reason = "SIGTERM"

        def interrupted(*_: object) -> None:
            self.reason = CTRL_C
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(OSError):  # nobody reads it any more
                os.write(2, b"\nends after this step; Ctrl-C again ends it at once\n")  # print is not safe in a handler

        before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, terminated),
            signal.SIGINT: signal.signal(signal.SIGINT, interrupted),
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
