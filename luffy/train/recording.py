"""The record of a run while it makes steps: metrics and samples on disk, and what the user sees of them."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from rich.console import Console

from luffy.metrics import Metric
from luffy.run_folder.changes import Start, set_records_aside, write_settings
from luffy.run_folder.console import RunView
from luffy.run_folder.recorder import Recorder, evaluation_rows
from luffy.step.run_state import Run, StepBatch
from luffy.step.sample_rows import Rows, batch_rows, in_order
from luffy.types import Group


class Records:
    """What a run writes and shows while it makes steps. All ranks have one; rank 0 alone writes and prints."""

    def __init__(self, run: Run, start: Start, console: Console | None = None) -> None:
        """Rows of steps after the last finished one, left by a killed process, are dropped."""
        self.run, self.garbage = run, GarbageCollection()
        self.recorder: Recorder | None = None
        if run.world.is_main:
            if not run.progress.step:
                run.messages.notices += set_records_aside(run.cfg.folder, 0)
            write_settings(start.recipe, run.progress.step, start)
            stage = {} if run.span is None else {"stage": run.span.stage.name}
            self.recorder = Recorder(run.cfg, run.progress.step or -1, run.messages.notices.append, stage)
            self.view = RunView(run.cfg.name, run.last_step, run.progress.step, console)
            self.recorder.warn, run.watch.on_phase = self.view.warn, self.view.phase
        else:
            self.view = RunView(run.cfg.name, run.last_step, 0, Console(quiet=True))
        run.messages.view = self.view
        for fact in run.messages.facts:
            self.view.say(fact)
        for notice in run.messages.notices:
            self.view.warn(notice)

    def close(self) -> None:
        self.garbage.close()
        self.run.messages.view = None
        if self.recorder is not None:
            self.recorder.close()
        self.view.close()

    def log(self, metrics: Mapping[str, Metric], speed: Mapping[str, float]) -> dict[str, float]:
        """Write and show the metrics of the last step; returns their values."""
        values = self._log(metrics, speed)
        self.view.step(self.run.progress.step, values)
        return values

    def log_evaluation(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Write and show an evaluation on its own: before the first step, or deferred to a resume."""
        values = self._log(metrics, {})
        self.view.evaluated(self.run.progress.step, values)
        return values

    def _log(self, metrics: Mapping[str, Metric], speed: Mapping[str, float]) -> dict[str, float]:
        """Write the values of the metrics that were measured, the seconds of each phase, and ``speed``."""
        values = {name: metric.value for name, metric in metrics.items() if metric.measured}
        values |= {**self.run.watch.take(), **speed}
        if self.recorder is not None:
            self.recorder.log(self.run.progress.step, values)
        return values

    def write_samples(self, rows: Rows, held_out: bool = False) -> None:
        if self.recorder is not None:
            (self.recorder.eval_samples if held_out else self.recorder.samples).write(rows)

    def rows_of(self, batch: StepBatch) -> Rows:
        """Rows of the first groups, with the tokens as the policy sees them now; none if this step is not recorded."""
        step, every = self.run.progress.step, self.run.cfg.record.samples_every
        if not every or (step != 1 and step % every):
            return []
        with self.run.watch("record"):
            return batch_rows(self.run, batch, self.run.cfg.record.samples, with_views=True)

    def rows_of_evaluation(self, name: str, groups: Sequence[Group]) -> Rows:
        """Rows of the first problems of a held-out set, always the same ones; none if none are recorded."""
        run, record = self.run, self.run.cfg.record
        if not record.samples_every:
            return []
        numbers = range(run.world.rank, record.samples, run.world.size)
        shown = zip(numbers, groups, strict=False)  # the first few of all
        step, tokenizer = run.progress.step, run.tokenizer
        return in_order(run.world, [(i, evaluation_rows(step, name, group, tokenizer)) for i, group in shown])


class GarbageCollection:
    """Spares Python's garbage collector the objects that stay for the whole training: modules, the model, compiled
    kernels, some 400,000 with `transformers` loaded. A full collection looks through all of them, for a quarter of a
    second in which the GPU waits, about once a step."""

    def __init__(self) -> None:
        self._frozen = False

    def freeze(self) -> None:
        """Freeze what exists after the first step, which loads and compiles what it needs. Frozen objects are still
        freed when nothing refers to them; cycles among them wait until ``close``."""
        if not self._frozen:
            gc.collect()
            gc.freeze()
            self._frozen = True

    def close(self) -> None:
        if self._frozen:
            gc.unfreeze()


def throughput(metrics: Mapping[str, Metric], seconds: float) -> dict[str, float]:
    """Trained tokens per second of the step; evaluation and saving have their own timings."""
    tokens = metrics["perf/update_tokens"].value if "perf/update_tokens" in metrics else 0.0
    return {"perf/throughput": tokens / seconds, "timing_s/step": seconds}


def idle_notice(idle: int, steps: int) -> list[str]:
    """A line if more than half of the steps made no update."""
    if 2 * idle <= steps:
        return []
    return [
        f"{idle} of {steps} steps changed nothing: all groups were all right or all wrong (batch/solve_all, "
        "batch/solve_none); easier problems, traces or algorithm.oversample_rounds may help, or a reward that "
        "works (batch/verifier_failures), with reward.success and reward.failure at its best and worst value"
    ]
