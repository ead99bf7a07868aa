"""The tables of the report: final figures, time per phase, what sets the methods apart, the runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from luffy.report.changes import changes_of
from luffy.report.curves import estimate
from luffy.report.figures import KNOWN_PHASES, crowded, phase_bar, phase_class, swatch
from luffy.report.methods import Method, Styled, differing_keys, show_value
from luffy.report.runs import RunRecord
from luffy.report.text import legible, number, shorten, show, show_seconds

EVALUATION = re.compile(r"val-(?P<name>[^/]+)/accuracy")
COMPONENT = "critic/component/"
STEP_SECONDS = "timing_s/step"
OUTSIDE_STEPS = ("timing_s/eval", "timing_s/save")  # which the seconds of a step leave out
NEGLIGIBLE = 0.005  # share of a step below which a phase has no column of its own
ROOMY_COLUMNS = 7  # more of them put the interval under the mean
LONGEST_VALUE = 160


@dataclass(frozen=True)
class Column:
    head: str  # neighbours of the same head share it
    below: str
    metric: str  # its name in JSON
    read: Callable[[RunRecord, str], float | None]  # of a run and the metric
    digits: int = 3

    def value(self, run: RunRecord) -> float | None:
        return self.read(run, self.metric)

    def values(self, runs: Sequence[RunRecord]) -> list[float]:
        """Of the runs that have one."""
        return [value for run in runs if (value := self.value(run)) is not None]


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
    columns = []
    for metric, name in evaluations(runs):
        accuracy = f"{name[0].upper()}{name[1:]} accuracy"
        columns += [
            Column(accuracy, "start", metric, RunRecord.at_start),
            Column(accuracy, "final", metric, RunRecord.last),
            Column(accuracy, "best", metric, RunRecord.best),
        ]
    reward, entropy, length = "critic/rewards/mean", "actor/entropy_loss", "response_length/mean"
    return [
        *columns,
        Column("Reward", "final", reward, last_if_sampled),
        *(Column(f"Reward {name}", "final", metric, last_if_sampled) for metric, name in components(runs)),
        Column("Entropy", "final", entropy, last_if_sampled),
        Column("Length", "final", length, RunRecord.last, 1),
        Column("Seconds", "in all", "seconds", lambda run, _: all_seconds(run), 1),
    ]


def all_seconds(run: RunRecord) -> float | None:
    """Of its steps with their evaluations and checkpoints, as the phases below the table have them."""
    parts = [run.total(name) for name in (STEP_SECONDS, *OUTSIDE_STEPS)]
    return None if parts[0] is None else sum(part or 0.0 for part in parts)


def last_if_sampled(run: RunRecord, metric: str) -> float | None:
    """SFT draws no samples: its zeros under these names mean nothing."""
    return run.last(metric) if run.kind == "train" else None


def final_table(methods: Sequence[Styled]) -> Markup:
    runs = [run for _, method in methods for run in method.runs]
    columns = [c for c in final_columns(runs) if c.values(runs)]
    columns = [c for c in columns if c.below not in ("start", "best")] if crowded(methods) else columns
    rows = [_final_row(style, method, columns) for style, method in methods]
    wide = " stacked" if len(columns) > ROOMY_COLUMNS else ""
    return table(_final_head(columns), rows, f"final{wide}")


def final_figures(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """The final figures for programs: of each method its runs with their values, and for every metric that was
    recorded the mean over runs, half the width of its 95 % interval (None of one run), and the lowest and highest."""
    columns = final_columns([run for method in methods for run in method.runs])
    return [
        {
            "method": method.label,
            "runs": [
                {"folder": str(run.folder), "seed": run.seed, "steps": run.steps}
                | {"figures": _by_metric(columns, {c: c.value(run) for c in columns})}
                for run in method.runs
            ],
            "figures": _by_metric(columns, {c: _mean_of(c, method.runs) for c in columns}),
        }
        for method in methods
    ]


def _mean_of(column: Column, runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    found = estimate(column.values(runs))
    return None if found is None else asdict(found)


def _by_metric(columns: Sequence[Column], values: Mapping[Column, Any]) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for column in columns:
        if values[column] is not None:
            figures.setdefault(column.metric, {})[column.below.replace(" ", "_")] = values[column]
    return figures


def _final_head(columns: Sequence[Column]) -> Markup:
    """Two rows: what is measured, and when."""
    upper = [Markup('<th scope="col" rowspan="2"{}>{}</th>').format(c, h) for h, c in _FIXED_HEADS]
    for head, same in groupby(columns, key=lambda column: column.head):
        upper.append(Markup('<th scope="colgroup" colspan="{}">{}</th>').format(len(list(same)), head))
    lower = [Markup('<th scope="col">{}</th>').format(column.below) for column in columns]
    return Markup("").join(upper) + Markup("</tr><tr>") + Markup("").join(lower)


_FIXED_HEADS = (("Method", Markup(' class="name"')), ("Seeds", ""), ("Steps", ""))


def _final_row(style: int, method: Method, columns: Sequence[Column]) -> Markup:
    cells = [method_head(style, method.label), _cell(str(len(method.runs))), _cell(steps_of(method.runs))]
    for column in columns:
        cells.append(Markup("<td>{}</td>").format(show_seeds(column.values(method.runs), column.digits)))
    return Markup("").join(cells)


def show_seeds(values: Sequence[float], digits: int = 3) -> Markup:
    """The mean over seeds: ``0.940 ± 0.012``, of few seeds ``0.940 0.931 to 0.949`` and each value in order of size."""
    found = estimate(values)
    if found is None:
        return Markup('<span class="none" title="not recorded">\u2013</span>')
    mean = Markup("<b>{}</b>").format(number(found.mean, digits))
    if found.half_width is None:
        return mean
    digits = 0 if abs(found.mean) >= 1000 else digits  # as exact as the mean beside it
    if not found.few:
        return mean + Markup(' <span class="pm">\u00b1 {}</span>').format(number(found.half_width, digits))
    low, high = number(found.low, digits), number(found.high, digits)
    if low == high:
        return mean  # every seed has it
    spread = mean + Markup(' <span class="pm">{} to {}</span>').format(low, high)
    if found.n == 2:
        return spread  # the range is each value
    each = " \u00b7 ".join(number(value, digits) for value in sorted(values))
    return spread + Markup(' <span class="each">{}</span>').format(each)


def steps_of(runs: Sequence[RunRecord]) -> str:
    """``30``, ``12 to 30`` where seeds differ, ``12 of 30`` where the recipe asks for more than was done."""
    steps = sorted({run.steps for run in runs})
    said = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    planned = max((run.planned_steps or 0 for run in runs if run.unfinished), default=0)
    return f"{said} of {planned}" if planned and planned != steps[-1] else said


def method_head(style: int, label: str) -> Markup:
    return Markup('<th scope="row" class="name">{} <span>{}</span></th>').format(swatch(style), show(label))


def _cell(text: str) -> Markup:
    return Markup("<td>{}</td>").format(text)


def table(head: Markup, rows: Sequence[Markup], kind: str) -> Markup:
    body = Markup("").join(Markup("<tr>{}</tr>").format(row) for row in rows)
    return Markup(
        '<div class="wide" tabindex="0"><table class="{}"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(kind, head, body)


def column_head(text: str, left: bool = False) -> Markup:
    return Markup('<th scope="col"{}>{}</th>').format(Markup(' class="name"') if left else "", show(text))


def phase_seconds(method: Method) -> dict[str, float]:
    """Mean seconds of a step by phase, over all steps of all seeds; ``other`` is what no phase claims. Evaluations and
    checkpoints count too, spread over all steps."""
    names = dict.fromkeys(k for run in method.runs for row in run.rows for k in row if k.startswith("timing_s/"))
    if STEP_SECONDS not in names:
        return {}
    phases = {name.removeprefix("timing_s/"): _a_step(method, name) for name in names if name != STEP_SECONDS}
    other = max(whole_seconds(method) - sum(phases.values()), 0.0)
    return phases | ({"other": other} if other > 0 else {})


def whole_seconds(method: Method) -> float:
    """Mean seconds of a step, with its share of evaluations and checkpoints. Less than the sum of the phases where
    rollouts are made ahead, during updates."""
    return sum(_a_step(method, name) for name in (STEP_SECONDS, *OUTSIDE_STEPS))


def _a_step(method: Method, name: str) -> float:
    steps = sum(len(run.series(STEP_SECONDS)) for run in method.runs)
    return sum(run.total(name) or 0.0 for run in method.runs) / steps if steps else 0.0


def phase_table(methods: Sequence[Styled]) -> Markup | None:
    """A stacked bar a method with its figures beside it; None where no run recorded times."""
    timed = [(style, method, phase_seconds(method)) for style, method in methods]
    phases = _worth_a_column([seconds for _, _, seconds in timed])
    if not phases:
        return None
    timed = [(style, method, _with_the_rest(seconds, phases)) for style, method, seconds in timed]
    phases = sorted({*phases, *(name for _, _, seconds in timed for name in seconds)}, key=_phase_order)
    longest = max(sum(seconds.values()) for _, _, seconds in timed) or 1.0
    heads = [column_head("Method", left=True), Markup('<th scope="col" class="bars">Seconds per step</th>')]
    heads += [_phase_head(phase) for phase in phases] + [column_head("all")]
    rows = [_phase_row(i, method, seconds, phases, longest) for i, method, seconds in timed if seconds]
    return table(Markup("").join(heads), rows, "phases")


def _worth_a_column(timed: Sequence[dict[str, float]]) -> list[str]:
    """Phases that are no trifle in at least one method."""
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


def _phase_order(phase: str) -> int:
    """As they follow each other in a step; phases of one's own after the known ones, the rest last."""
    known = KNOWN_PHASES.index(phase) if phase in KNOWN_PHASES else len(KNOWN_PHASES)
    return known + (phase == "other")


def _phase_head(phase: str) -> Markup:
    square = '<svg class="square" viewBox="0 0 10 10" aria-hidden="true"><rect class="{}" width="10" height="10"/>'
    return Markup('<th scope="col">' + square + "</svg> {}</th>").format(phase_class(phase), phase.replace("_", " "))


def _phase_row(style: int, method: Method, seconds: dict[str, float], phases: Sequence[str], longest: float) -> Markup:
    ordered = {phase: seconds[phase] for phase in phases if phase in seconds}
    bar = phase_bar(ordered, longest, method.label)
    cells = [method_head(style, method.label), Markup('<td class="bars">{}</td>').format(bar)]
    cells += [_cell(show_seconds(seconds[phase]) if phase in seconds else "\u2013") for phase in phases]
    cells.append(_cell(show_seconds(whole_seconds(method))))
    return Markup("").join(cells)


def difference_table(methods: Sequence[Styled]) -> Markup | None:
    """Every knob in which the methods differ, a column for each method; of many methods, a row for each. None where
    there is nothing to tell apart."""
    keys = differing_keys([method for _, method in methods]) if len(methods) > 1 else []
    if not keys:
        return None
    if crowded(methods):
        return _unusual_table(methods, keys)
    heads = [column_head("Knob", left=True)]
    heads += [Markup('<th scope="col">{} {}</th>').format(swatch(i), show(m.label)) for i, m in methods]
    rows = [_difference_row(key, [method for _, method in methods]) for key in keys]
    return table(Markup("").join(heads), rows, "knobs")


def _unusual_table(methods: Sequence[Styled], keys: Sequence[str]) -> Markup:
    """A row for each method: the knobs that it does not have as most methods do."""
    usual = {key: _most_common([method.settings.get(key) for _, method in methods]) for key in keys}
    head = column_head("Method", left=True) + column_head("Differs from most in", left=True)
    return table(head, [_unusual_row(style, method, usual) for style, method in methods], "unusual")


def _most_common(values: Sequence[Any]) -> str:
    return Counter(show_value(value) for value in values).most_common(1)[0][0]


def _unusual_row(style: int, method: Method, usual: Mapping[str, str]) -> Markup:
    own = {key: show_value(method.settings.get(key)) for key in usual}
    items = [
        Markup("<code>{}=<wbr>{}</code>").format(show(key), show(shorten(value, LONGEST_VALUE)))
        for key, value in own.items()
        if value != usual[key]
    ]
    said = Markup(" ").join(items) or Markup('<span class="none">nothing</span>')
    return method_head(style, method.label) + Markup('<td class="name">{}</td>').format(said)


def _difference_row(key: str, methods: Sequence[Method]) -> Markup:
    cells = [Markup('<th scope="row" class="name"><code>{}</code></th>').format(show(key))]
    for method in methods:
        value = show_value(method.settings[key]) if key in method.settings else "\u2013"
        cells.append(Markup("<td><code>{}</code></td>").format(show(shorten(value, LONGEST_VALUE))))
    return Markup("").join(cells)


def change_table(methods: Sequence[Styled]) -> Markup | None:
    """Every setting that a resume changed, run by run; None where none did."""
    rows = [
        _change_row(style, method.label, run, step, key, values)
        for style, method in methods
        for run in method.runs
        for step, changes in changes_of(run.folder)
        for key, values in changes.items()
    ]
    heads = ["Method", "Seed", "After step", "Knob", "From", "To"]
    head = Markup("").join(column_head(h, left=h == "Method") for h in heads)
    return table(head, rows, "changes") if rows else None


def _change_row(style: int, label: str, run: RunRecord, step: int, key: str, values: tuple[Any, Any]) -> Markup:
    cells = [method_head(style, label), _cell(seed_of(run)), _cell(str(step))]
    written = (key, *(shorten(show_value(value), LONGEST_VALUE) for value in values))
    cells += [Markup("<td><code>{}</code></td>").format(show(text)) for text in written]
    return Markup("").join(cells)


def run_table(methods: Sequence[Styled]) -> Markup:
    """Every run by itself: what the means above are made of."""
    metrics = evaluations([run for _, method in methods for run in method.runs])
    heads = ["Method", "Seed", "Steps", *(f"Final {name} accuracy" for _, name in metrics), "Seconds", "Folder"]
    head = Markup("").join(column_head(h, left=h in ("Method", "Folder")) for h in heads)
    rows = [_run_row(i, m.label, run, [k for k, _ in metrics]) for i, m in methods for run in m.runs]
    return table(head, rows, "runs")


def _run_row(style: int, label: str, run: RunRecord, metrics: Sequence[str]) -> Markup:
    values = [run.last(metric) for metric in metrics]
    cells = [method_head(style, label), _cell(seed_of(run)), _cell(steps_of([run]))]
    cells += [_cell("\u2013" if value is None else number(value)) for value in values]
    seconds = all_seconds(run)
    cells.append(_cell("\u2013" if seconds is None else number(seconds, 1)))
    cells.append(Markup('<td class="name"><code>{}</code></td>').format(show(str(run.folder))))
    return Markup("").join(cells)


def seed_of(run: RunRecord) -> str:
    return "\u2013" if run.seed is None else str(run.seed)
