"""The record of a run: settings, figures and samples on disk, and what the user sees of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from luffy.config import to_yaml
from luffy.files import write_atomically
from luffy.metrics import Metric
from luffy.plugins import load_plugins
from luffy.report.changes import kept_settings, settings_at, settings_before
from luffy.report.console import RunView
from luffy.report.recorder import Recorder, SilentRecorder, evaluation_rows, sample_rows, trace_rows
from luffy.report.runs import CONFIG, DATA
from luffy.train.batch import StepBatch
from luffy.train.changes import changed_settings, in_words
from luffy.train.checkpoint import set_records_aside
from luffy.train.credit import uncredited
from luffy.train.lasting_objects import LastingObjects
from luffy.train.run_state import Run
from luffy.types import Group, Sample, TokenView

Rows = list[dict[str, Any]]


class Records:
    """What a run writes and shows while it makes steps. All ranks have one; rank 0 alone writes and speaks."""

    def __init__(self, run: Run, console: Console | None = None) -> None:
        """Rows of steps after the last finished one, of a process that was killed, are dropped."""
        self.run, self.lasting = run, LastingObjects()
        if run.world.is_main:
            earlier = None if run.progress.step else set_records_aside(run.cfg.folder, 0)
            run.messages.notices += [earlier] if earlier else []
            write_settings(run)
            self.recorder: Recorder = Recorder(run.cfg, run.progress.step or -1, run.messages.notices.append)
            self.view = RunView(run.cfg.name, run.total_steps, run.progress.step, console)
            self.recorder.warn, run.watch.on_phase = self.view.warn, self.view.phase
        else:
            self.recorder = SilentRecorder(run.cfg)
            self.view = RunView(run.cfg.name, run.total_steps, 0, Console(quiet=True))
        run.messages.view = self.view
        for fact in run.messages.facts:
            self.view.say(fact)
        for notice in run.messages.notices:
            self.view.warn(notice)

    def close(self) -> None:
        self.lasting.close()
        self.run.messages.view = None
        self.recorder.close()
        self.view.close()

    def log(self, metrics: Mapping[str, Metric], speed: Mapping[str, float]) -> dict[str, float]:
        """The figures of the last step, written and shown. Returns them."""
        step, values = self.run.progress.step, self._values(metrics) | dict(speed)
        self.recorder.log(step, values)
        self.view.step(step, values)
        return values

    def log_evaluation(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """The figures of an evaluation that stands by itself: before the first step, or made up for."""
        step, values = self.run.progress.step, self._values(metrics)
        self.recorder.log(step, values)
        self.view.evaluated(step, values)
        return values

    def _values(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """For the record; what was not measured is left out."""
        measured = {name: metric.value for name, metric in metrics.items() if metric.measured}
        return measured | self.run.watch.take()

    def rows_of(self, batch: StepBatch) -> Rows:
        """Rows of the first groups, with the tokens as the policy sees them now; none if this step is not recorded."""
        if not self.recorder.wants_samples(self.run.progress.step):
            return []
        with self.run.watch("record"):
            return batch_rows(self.run, batch, self.run.cfg.record.samples, with_views=True)

    def rows_of_evaluation(self, name: str, groups: Sequence[Group]) -> Rows:
        """Rows of the first problems of a held-out set, always the same ones; none if none are recorded."""
        run = self.run
        if not run.cfg.record.samples_every:
            return []
        numbers = range(run.world.rank, run.cfg.record.samples, run.world.size)
        shown = zip(numbers, groups, strict=False)  # the first few of all
        return _in_order(
            run, [(i, evaluation_rows(run.progress.step, name, group, run.tokenizer)) for i, group in shown]
        )


def write_settings(run: Run) -> None:
    """config.yaml and data.json; settings that were changed at a resume keep those before under another name. A branch
    takes those of the run it came from."""
    folder, step, origin = run.cfg.folder, run.progress.step, run.origin
    if origin not in (None, folder):
        take_over_settings(origin, folder, step)
    kept = settings_before(folder, step)
    if run.changes and not kept.exists():  # an earlier resume at this step kept the ones that its steps were made with
        assert origin is not None
        write_atomically(kept, settings_at(origin, step).read_text(encoding="utf-8"))
    write_atomically(folder / CONFIG, to_yaml(run.cfg))
    for later in (path for last, path in kept_settings(folder).items() if last > step):
        later.unlink()  # of steps that are made anew
    write_atomically(folder / DATA, json.dumps(run.data_report(), indent=1) + "\n")
    keep_plugins(run)


def take_over_settings(origin: Path, folder: Path, step: int) -> None:
    """The files of settings that a run in ``origin`` had before those of ``step``, instead of any in ``folder``."""
    for path in kept_settings(folder).values():
        path.unlink()
    for last, path in kept_settings(origin).items():
        if last < step:
            shutil.copyfile(path, folder / path.name)


def keep_plugins(run: Run) -> None:
    """A copy of each plugin's source; one that was changed at a resume keeps the one before under another name."""
    folder = run.cfg.folder / "plugins"
    changed = changed_plugins(run)
    for module in load_plugins(run.cfg.plugins):
        folder.mkdir(exist_ok=True)
        for last, path in _kept_plugins(folder, module.__name__).items():
            if last > run.progress.step:
                path.unlink()  # of steps that are made anew
        if module.__name__ in changed:
            write_atomically(_kept_plugin(folder, module.__name__, run.progress.step), changed[module.__name__])
        write_atomically(folder / f"{module.__name__}.py", _source_of(module))


def changed_plugins(run: Run) -> dict[str, str]:
    """The sources before of plugins that were changed since the last finished step, by name."""
    folder = (run.origin or run.cfg.folder) / "plugins"
    found = {}
    for module in load_plugins(run.cfg.plugins):
        kept = _kept_plugins(folder, module.__name__)
        record = next((path for last, path in kept.items() if last >= run.progress.step), None)
        record = record or folder / f"{module.__name__}.py"
        if record.exists() and (before := record.read_text(encoding="utf-8")) != _source_of(module):
            found[module.__name__] = before
    return found


def _kept_plugin(folder: Path, name: str, step: int) -> Path:
    return folder / f"{name}-step-{step:06d}.py"


def _kept_plugins(folder: Path, name: str) -> dict[int, Path]:
    """Sources that are no longer those of the run, by the last step that was made with them; in order."""
    found = {path.stem.removeprefix(f"{name}-step-"): path for path in folder.glob(f"{name}-step-*.py")}
    return dict(sorted((int(last), path) for last, path in found.items() if last.isdecimal()))


def _source_of(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def note_changes(run: Run) -> None:
    """Compare settings and plugins with those that the steps so far were made with, where they are known."""
    step, origin = run.progress.step, run.origin
    if origin is None:
        return
    run.changes = run.world.on_main(lambda: changed_settings(origin, step, run.cfg))
    since = f"since step {step}" + (f" of {origin}" if origin != run.cfg.folder else "")
    if run.changes:
        said = in_words(run.changes, run.cfg, run.method)
        kept = f"the settings before are in {settings_before(run.cfg.folder, step)}"
        run.messages.notices.append(f"settings changed {since}: {said} ({kept})")
    for name in run.world.on_main(lambda: changed_plugins(run)):
        source = _kept_plugin(run.cfg.folder / "plugins", name, step)
        run.messages.notices.append(f"plugin {name} changed {since} (its source before is in {source})")


def write_bad_step(run: Run, batch: StepBatch) -> Path:
    """All samples of a step whose update was not finite; returns their file."""
    path = run.cfg.folder / f"bad-step-{run.progress.step:06d}.jsonl"
    rows = batch_rows(run, batch)
    if run.world.is_main:
        write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def batch_rows(run: Run, batch: StepBatch, count: float = math.inf, with_views: bool = False) -> Rows:
    """Rows of samples.jsonl of the first ``count`` groups, whichever rank holds them. ``with_views``: the policy scores
    their tokens, on all ranks."""
    credited = {i: samples for i, samples in batch.samples.items() if i < count}
    rejected = {i: [uncredited(r) for r in group.rollouts] for i, group in batch.rejected.items() if i < count}
    views = _token_views(run, credited) | _token_views(run, rejected) if with_views else {}
    return _in_order(run, [(i, _group_rows(run, batch, i, views.get(i, ()))) for i in [*credited, *rejected]])


def _token_views(run: Run, groups: Mapping[int, Sequence[Sample]]) -> dict[int, list[TokenView]]:
    views = iter(run.policy.token_views([sample for group in groups.values() for sample in group]))
    return {i: [next(views) for _ in group] for i, group in groups.items()}


def _group_rows(run: Run, batch: StepBatch, i: int, views: Sequence[TokenView]) -> Rows:
    step, samples = run.progress.step, batch.samples.get(i)
    if run.method == "sft":
        return trace_rows(step, samples or [], run.tokenizer, views, i)
    group = batch.rejected[i] if samples is None else batch.groups[i]
    return sample_rows(step, group, samples, run.tokenizer, views)


def _in_order(run: Run, rows: list[tuple[int, Rows]]) -> Rows:
    """Rows of all ranks, by their numbers."""
    ordered = sorted((pair for part in run.world.gather(rows) for pair in part), key=lambda pair: pair[0])
    return [row for _, part in ordered for row in part]


def throughput(metrics: Mapping[str, Metric], seconds: float) -> dict[str, float]:
    """Tokens that were trained on per second of the step; evaluation and saving have their own timings."""
    tokens = metrics["perf/update_tokens"].value if "perf/update_tokens" in metrics else 0.0
    return {"perf/throughput": tokens / seconds, "timing_s/step": seconds}


def warn_if_mostly_idle(run: Run, idle: int, steps: int) -> None:
    if 2 * idle > steps:
        run.messages.warn(
            f"{idle} of {steps} steps changed nothing: all groups were all right or all wrong (batch/solve_all, "
            "batch/solve_none); easier problems, traces or algorithm.oversample_rounds may help, or a reward that "
            "works (batch/verifier_failures)"
        )
