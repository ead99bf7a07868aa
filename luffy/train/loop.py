"""The training loop: steps (training_step.py), and between them evaluations, records and checkpoints.

The run's state is one value (run_state.py); what a killed run needs to go on is in its checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from luffy.config import Config, EvalConfig, check_made_for
from luffy.distributed.world import World
from luffy.errors import AllStopped, TrainingStopped
from luffy.metrics import Metric
from luffy.models.threads import use_threads
from luffy.report.console import setting_up, was_idle
from luffy.seeds import seed_of
from luffy.train import held_out, recording, saving
from luffy.train.activations import out_of_memory_advice
from luffy.train.batch import StepBatch
from luffy.train.build import build_run
from luffy.train.recording import Records
from luffy.train.run_state import Method
from luffy.train.saved_state import Progress
from luffy.train.stopping import StopRequest
from luffy.train.training_step import ignore, rl_step, sft_step


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
        check_made_for(cfg, method)
        use_threads(cfg.train.threads)
        self.on_step, self.console = on_step, console
        world = world or World()
        with setting_up(cfg.name, console, world.is_main) as announce:
            self.run = build_run(cfg, method, world, resume, allow_changed_data, announce)
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
        return held_out.is_missing(self.run)

    def train(self) -> Path:
        """Run to the last step; ``on_step`` gets every step's number and metrics. Returns the model folder of the
        newest checkpoint."""
        with closing(self.steps()) as steps:
            for step, values in steps:
                self.on_step(step, values)
        return self.run.world.on_main(lambda: saving.newest_model(self.run))

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
        run, started, before = self.run, time.perf_counter(), self.run.progress.step
        try:
            metrics = self.step(records).metrics
        except Exception as error:
            if run.progress.step == before and self._is_everywhere(error):  # else the weights may be half-way
                self._save_finished_steps()
            raise
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
        torch.manual_seed(seed_of(f"{run.cfg.seed}:{step}:{run.world.rank}"))  # of dropout: the same after a resume
        rows: recording.Rows = []
        observe = ignore if records is None else lambda batch: rows.extend(records.rows_of(batch))
        try:
            batch = (rl_step if run.method == "rl" else sft_step)(run, step, observe)
        except Exception:
            if run.progress.step == step:  # no update was made: the run can go on from the step before
                run.rewind()
            raise
        if records is not None:
            records.recorder.write_samples(rows)
            records.lasting.set_aside()
        return batch

    def _is_everywhere(self, error: Exception) -> bool:
        """Whether all processes have this error: a record and a checkpoint need all."""
        return self.run.world.size == 1 or isinstance(error, AllStopped)

    def _save_finished_steps(self) -> None:
        """An error must not cost the steps before it. Where saving fails too, the error is still what is told."""
        run = self.run
        try:
            saving.save_if_new(run)
        except Exception as second:
            run.messages.warn(f"no checkpoint of step {run.progress.step}: {type(second).__name__}: {second}")

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
        """The metrics of an evaluation; where it fails, its step is recorded and saved."""
        try:
            return self.evaluate(records=records)
        except held_out.EvaluationInterrupted:
            return {}
        except Exception as error:
            if self._is_everywhere(error):
                records.log(metrics, speed)
                self._save_finished_steps()
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
