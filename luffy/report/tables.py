"""The tables of the report: final values, time per phase, configuration differences, stages, the runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from markupsafe import Markup

from luffy.errors import UserError
from luffy.report.curves import estimate
from luffy.report.methods import Method, differing_keys, show_value
from luffy.report.svg import crowded
from luffy.report.templates import PHASES, macro
from luffy.report.text import legible, number, shorten
from luffy.run_folder.changes import changes_of
from luffy.run_folder.runs import RunRecord
from luffy.run_folder.stages import FinishedStage, read_stages

EVALUATION = re.compile(r"val-(?P<name>[^/]+)/accuracy")
COMPONENT = "critic/component/"
STEP_SECONDS = "timing_s/step"
OUTSIDE_STEPS = ("timing_s/eval", "timing_s/save")  # which the seconds of a step leave out
NEGLIGIBLE = 0.005  # fraction of a step below which a phase has no column
ROOMY_COLUMNS = 7  # more of them put the interval under the mean
LONGEST_VALUE = 160
NONE = "\u2013"


@dataclass(frozen=True)
class Column:
    """A column of the final table: ``read(run, metric)`` is its value of a run."""

    head: str  # neighbours of the same head share it
    below: str
    metric: str  # its name in JSON
    read: Callable[[RunRecord, str], float | None]
    digits: int = 3

    def values(self, runs: Sequence[RunRecord]) -> list[float]:
        """The values of the runs that have one."""
        return [value for run in runs if (value := self.read(run, self.metric)) is not None]


def evaluations(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """(metric, name) of every accuracy that some run recorded; the run's own held-out set comes first."""
    matches = (EVALUATION.fullmatch(metric) for run in runs for metric in run.metrics)
    found = {match[0]: match["name"] for match in matches if match}
    order = sorted(found, key=lambda metric: (metric != "val-core/accuracy", metric))
    return [(metric, {"core": "held-out", "ood": "OOD"}.get(found[metric], found[metric])) for metric in order]


def components(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """(metric, name) of every reward of a weighted sum, in the order of their names."""
    found = sorted({metric for run in runs for metric in run.metrics if metric.startswith(COMPONENT)})
    return [(metric, legible(metric.removeprefix(COMPONENT))) for metric in found]


def final_columns(runs: Sequence[RunRecord]) -> list[Column]:
    """Accuracies of every evaluated set, rewards, entropy, length and seconds."""
    columns = []
    for metric, name in evaluations(runs):
        accuracy = f"{name[0].upper()}{name[1:]} accuracy"
        columns += [
            Column(accuracy, "start", metric, RunRecord.at_start),
            Column(accuracy, "final", metric, RunRecord.last),
            Column(accuracy, "best", metric, RunRecord.best),
        ]
    return [
        *columns,
        Column("Reward", "final", "critic/rewards/mean", last_if_sampled),
        *(Column(f"Reward {name}", "final", metric, last_if_sampled) for metric, name in components(runs)),
        Column("Entropy", "final", "actor/entropy_loss", last_if_sampled),
        Column("Length", "final", "response_length/mean", RunRecord.last, 1),
        Column("Seconds", "in all", "seconds", lambda run, _: all_seconds(run), 1),
    ]


def all_seconds(run: RunRecord) -> float | None:
    """Seconds of all steps with their evaluations and checkpoints, as in the table of phases."""
    parts = [run.total(name) for name in (STEP_SECONDS, *OUTSIDE_STEPS)]
    return None if parts[0] is None else sum(part or 0.0 for part in parts)


def last_if_sampled(run: RunRecord, metric: str) -> float | None:
    """The last value; none for SFT, which draws no samples, so its zeros mean nothing."""
    return run.last(metric) if run.kind == "train" else None


def final_table(methods: Sequence[Method]) -> Markup:
    """A row of final values for each method; without start and best if there are many."""
    runs = [run for method in methods for run in method.runs]
    columns = [c for c in final_columns(runs) if c.values(runs)]
    columns = [c for c in columns if c.below not in ("start", "best")] if crowded(methods) else columns
    groups = [(name, len(list(same))) for name, same in groupby(columns, key=lambda column: column.head)]
    rows = [
        (m, (len(m.runs), steps_of(m.runs)), [over_seeds(c.values(m.runs), c.digits) for c in columns]) for m in methods
    ]
    return macro("final_table", groups, columns, rows, wide=len(columns) > ROOMY_COLUMNS)


def final_figures(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """The final table for programs. Each method has its runs with their values, and for every recorded metric the mean
    over runs, half the width of its 95 % interval (None of one run), and the lowest and highest."""
    columns = final_columns([run for method in methods for run in method.runs])
    return [
        {
            "method": method.label,
            "runs": [
                {"folder": str(run.folder), "seed": run.seed, "steps": run.steps}
                | {"figures": _by_metric(columns, [c.read(run, c.metric) for c in columns])}
                for run in method.runs
            ],
            "figures": _by_metric(columns, [estimate(c.values(method.runs)) for c in columns]),
        }
        for method in methods
    ]


def _by_metric(columns: Sequence[Column], values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for column, value in zip(columns, values, strict=True):
        if value is not None:
            known = value if isinstance(value, float) else asdict(value)
            figures.setdefault(column.metric, {})[column.below.replace(" ", "_")] = known
    return figures


def over_seeds(values: Sequence[float], digits: int = 3) -> dict[str, str] | None:
    """The mean over seeds, with ``± 0.012``; of few seeds with ``0.931 to 0.949`` and each value in order of size."""
    found = estimate(values)
    if found is None:
        return None
    shown = {"mean": number(found.mean, digits), "spread": "", "each": ""}
    digits = 0 if abs(found.mean) >= 1000 else digits  # as exact as the mean
    low, high = number(found.low, digits), number(found.high, digits)
    if found.half_width is not None and not found.few:
        shown["spread"] = f"\u00b1 {number(found.half_width, digits)}"
    elif low != high:
        shown["spread"] = f"{low} to {high}"
        shown["each"] = " \u00b7 ".join(number(value, digits) for value in sorted(values)) if found.n > 2 else ""
    return shown


def steps_of(runs: Sequence[RunRecord]) -> str:
    """``30``; ``12 to 30`` if seeds differ; ``12 of 30`` if the recipe asks for more steps than were done."""
    steps = sorted({run.steps for run in runs})
    said = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    planned = max((run.planned_steps or 0 for run in runs if run.unfinished), default=0)
    return f"{said} of {planned}" if planned and planned != steps[-1] else said


def phase_seconds(method: Method) -> dict[str, float]:
    """Mean seconds of a step by phase, over all steps of all seeds; ``other`` is the rest. Evaluations and checkpoints
    count too, spread over all steps."""
    names = dict.fromkeys(k for run in method.runs for row in run.rows for k in row if k.startswith("timing_s/"))
    if STEP_SECONDS not in names:
        return {}
    phases = {name.removeprefix("timing_s/"): _per_step(method, name) for name in names if name != STEP_SECONDS}
    other = max(whole_seconds(method) - sum(phases.values()), 0.0)
    return phases | ({"other": other} if other > 0 else {})


def whole_seconds(method: Method) -> float:
    """Mean seconds of a step with evaluations and checkpoints. Less than the sum of the phases if rollouts are
    prefetched during updates."""
    return sum(_per_step(method, name) for name in (STEP_SECONDS, *OUTSIDE_STEPS))


def _per_step(method: Method, name: str) -> float:
    steps = sum(len(run.series(STEP_SECONDS)) for run in method.runs)
    return sum(run.total(name) or 0.0 for run in method.runs) / steps if steps else 0.0


def phase_table(methods: Sequence[Method]) -> Markup | None:
    """A stacked bar for each method with its values next to it; None if no run recorded times."""
    timed = [(method, phase_seconds(method)) for method in methods]
    large = _large_phases([seconds for _, seconds in timed])
    if not large:
        return None
    rows = [(method, _with_the_rest(seconds, large), whole_seconds(method)) for method, seconds in timed]
    order = [*PHASES, *(phase for phase in large if phase not in PHASES and phase != "other"), "other"]
    phases = [phase for phase in order if phase in large or any(phase in seconds for _, seconds, _ in rows)]
    rows = [(method, {p: seconds[p] for p in phases if p in seconds}, all_) for method, seconds, all_ in rows]
    longest = max(sum(seconds.values()) for _, seconds, _ in rows) or 1.0
    return macro("phase_table", phases, [row for row in rows if row[1]], longest)


def _large_phases(timed: Sequence[dict[str, float]]) -> list[str]:
    """Phases that are not negligible in at least one method."""
    found = dict.fromkeys(
        phase
        for seconds in timed
        for phase, spent in seconds.items()
        if phase != "other" and spent >= NEGLIGIBLE * sum(seconds.values())
    )
    return list(found) or (["other"] if any(timed) else [])


def _with_the_rest(seconds: dict[str, float], phases: Sequence[str]) -> dict[str, float]:
    shown = {phase: spent for phase, spent in seconds.items() if phase in phases}
    rest = sum(spent for phase, spent in seconds.items() if phase not in phases)
    return shown | ({"other": rest} if rest > 0 else {})


def difference_table(methods: Sequence[Method]) -> Markup | None:
    """Every setting in which the methods differ, a column for each method; with many methods, a row for each. None if
    there is nothing to compare."""
    keys = differing_keys([method for method in methods]) if len(methods) > 1 else []
    if not keys:
        return None
    if crowded(methods):
        return _unusual_table(methods, keys)
    rows = [(key, [_value(m.settings[key]) if key in m.settings else NONE for m in methods]) for key in keys]
    return macro("difference_table", methods, rows)


def _unusual_table(methods: Sequence[Method], keys: Sequence[str]) -> Markup:
    """A row for each method: its settings that most methods do not have."""
    values = {key: [show_value(method.settings.get(key)) for method in methods] for key in keys}
    usual = {key: Counter(column).most_common(1)[0][0] for key, column in values.items()}
    rows = [
        (method, [(k, shorten(v[i], LONGEST_VALUE)) for k, v in values.items() if v[i] != usual[k]])
        for i, method in enumerate(methods)
    ]
    return macro("unusual_table", rows)


def _value(value: Any) -> str:
    return shorten(show_value(value), LONGEST_VALUE)


def change_table(methods: Sequence[Method]) -> Markup | None:
    """Every setting that a resume changed, run by run; None if none did."""
    rows = [
        (method, seed_of(run), step, (key, *map(_value, values)))
        for method in methods
        for run in method.runs
        for step, changes in changes_of(run.folder)
        for key, values in changes.items()
    ]
    return macro("change_table", rows) if rows else None


def stage_table(methods: Sequence[Method]) -> Markup | None:
    """A row for each stage of each run; None without stages."""
    heads = ["Method", "Seed", "Stage", "Trained by", "Steps", "Ended when", "Handed on", "Accuracy", "Loss", "Seconds"]
    rows = [(m, cells) for m in methods for run in m.runs for cells in stage_cells(run)]
    return macro("stage_table", heads, rows) if rows else None


def run_table(methods: Sequence[Method]) -> Markup:
    """A row for every run."""
    metrics = evaluations([run for method in methods for run in method.runs])
    heads = ["Method", "Seed", "Steps", *(f"Final {name} accuracy" for _, name in metrics), "Seconds", "Folder"]
    rows = [
        (method, _run_cells(run, [metric for metric, _ in metrics]), str(run.folder))
        for method in methods
        for run in method.runs
    ]
    return macro("run_table", heads, rows)


def _run_cells(run: RunRecord, metrics: Sequence[str]) -> list[str]:
    final = (_shown(run.last(metric)) for metric in metrics)
    return [seed_of(run), steps_of([run]), *final, _shown(all_seconds(run), 1)]


def seed_of(run: RunRecord) -> str:
    """The seed as text."""
    return NONE if run.seed is None else str(run.seed)


# ---- stages of a run


ENDED = {"steps": "its steps were made", "seconds": "its seconds were spent", "flat_loss": "held-out loss was flat",
         "flat_accuracy": "held-out accuracy was flat"}  # fmt: skip


def borders(runs: Sequence[RunRecord]) -> dict[int, str]:
    """The last step of each stage that another follows, with the name of that one."""
    found: dict[int, str] = {}
    for run in runs:
        before: Mapping[str, object] | None = None
        for row in run.rows:
            name = row.get("stage")
            if before is not None and isinstance(name, str) and before.get("stage") not in (None, name):
                found.setdefault(int(str(before["step"])), legible(name))
            before = row
    return found


def stage_cells(run: RunRecord) -> list[list[str]]:
    """The texts of the table's rows on one run. Accuracy and loss are the stage's last held-out ones."""
    done = {stage.name: stage for stage in _finished(run)}
    return [[seed_of(run), legible(name), *_cells(run, name, done.get(name))] for name in run.stage_names]


def _finished(run: RunRecord) -> Sequence[FinishedStage]:
    try:
        return read_stages(run.folder).finished
    except (UserError, OSError):
        return ()


def _cells(run: RunRecord, name: str, done: FinishedStage | None) -> list[str]:
    rows = [row for row in run.rows if row.get("stage") == name and row["step"] > 0]
    if not rows:
        return [NONE, "not begun", NONE, NONE, NONE, NONE, NONE]
    stage = replace(run, rows=rows)
    first, last = int(rows[0]["step"]), stage.steps
    if done is not None:
        first, last = done.first + 1, done.last
    return [
        "RL" if stage.kind == "train" else "SFT",
        f"{first} to {last}",
        NONE if done is None else ENDED.get(done.ended_by, NONE),
        NONE if done is None else f"step {done.handed_on}",
        _shown(stage.last("val-core/accuracy")),
        _shown(stage.last("val-traces/loss")),
        _shown(all_seconds(stage), 1),
    ]


def _shown(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else number(value, digits)
