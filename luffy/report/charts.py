"""Which metrics are drawn, and the grid of their charts: the same in the report and on the live page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from luffy.report.curves import MOST_POINTS, envelope, smooth, thin_out
from luffy.report.figures import Line, hover_data, line_chart, swatch
from luffy.report.method_families import families
from luffy.report.methods import Styled
from luffy.report.runs import RunRecord, first_stage, is_number
from luffy.report.tables import STEP_SECONDS, components, evaluations
from luffy.report.text import show


def always(run: RunRecord) -> bool:
    return True


def samples_rollouts(run: RunRecord) -> bool:
    return run.kind == "train"


def has_traces(run: RunRecord) -> bool:
    """Gates and the replay may bring some where ``guidance.n_prefix`` is 0."""
    return run.config.get("guidance.n_prefix") != 0 or any(row.get("batch/off_solved") for row in run.rows)


def by_step(run: RunRecord) -> dict[int, float]:
    return {int(row["step"]): int(row["step"]) for row in run.rows}


def process_seconds(run: RunRecord) -> dict[int, float]:
    return _added_up(run, STEP_SECONDS, lambda stage: stage.processes)


def update_tokens(run: RunRecord) -> dict[int, float]:
    return _added_up(run, "perf/update_tokens", lambda stage: 1)


def _added_up(run: RunRecord, metric: str, times: Callable[[RunRecord], int], stages: int = 4) -> dict[int, float]:
    """What a run had spent after each step, on top of the run whose model it started from; empty where the metric was
    not recorded."""
    if metric not in run.metrics:
        return {}
    before = first_stage(run) if stages > 1 else None
    earlier = {} if before is None else _added_up(before, metric, times, stages - 1)
    total = max(earlier.values(), default=0.0)
    places = {0: total}
    for row in run.rows:
        value = row.get(metric)
        total += times(run) * max(float(value), 0.0) if is_number(value) else 0.0
        places[int(row["step"])] = total
    return places


@dataclass(frozen=True)
class Axis:
    """What values are drawn against: where each step of a run stands on it."""

    name: str
    places: Callable[[RunRecord], Mapping[int, float]]


STEPS = Axis("step", by_step)


def compute_axes(runs: Sequence[RunRecord]) -> dict[Axis, str]:
    """What the first chart is drawn against besides, and what that is."""
    seconds = {Axis("GPU seconds", process_seconds): "each process is a GPU, or a CPU run; earlier stages included"}
    if runs and all(run.on_cpu for run in runs):
        seconds = {Axis("seconds", process_seconds): "of all processes together, earlier stages included"}
    return seconds | {Axis("tokens", update_tokens): "in updates, earlier stages included"}


@dataclass(frozen=True)
class Chart:
    """A metric to draw. What was not measured is not on record, but early records of 0.1.0 have 0 there: where 0 cannot
    be a real value it is no point (``zero_is_empty``), and ``of`` says which runs can have the metric."""

    metric: str
    title: str
    about: str
    from_zero: bool = False
    zero_is_empty: bool = False
    of: Callable[[RunRecord], bool] = always
    axis: Axis = STEPS

    @property
    def name(self) -> str:
        return self.metric if self.axis is STEPS else f"{self.metric} by {self.axis.name}"

    def points(self, run: RunRecord) -> list[tuple[float, float]]:
        if not self.of(run):
            return []
        at = self.axis.places(run)
        return [(at[step], y) for step, y in run.series(self.metric) if (y or not self.zero_is_empty) and step in at]


CHARTS = (
    Chart("critic/rewards/mean", "Reward, on-policy", "mean reward of the policy's own samples", True),
    Chart("batch/off_solved", "Reward, off-policy", "share of guided samples that are right", True,
          of=has_traces),
    Chart("batch/rejected", "Groups without a signal", "left out of the update: all right or all wrong", True,
          of=samples_rollouts),
    Chart("actor/entropy_loss", "Entropy", "mean entropy of the policy per token, in nats", True, True),
    Chart("response_length/mean", "Response length", "tokens; of the traces in SFT"),
    Chart("actor/off_policy_prob", "Off-policy probability", "of teacher tokens in the RL term, under the policy", True,
          True),
    Chart("actor/pg_clipfrac", "Clip fraction", "share of ratios beyond the clip range", True, of=samples_rollouts),
    Chart("actor/sft_loss", "SFT loss", "negative log-likelihood per trace token, in nats", True, True),
    Chart("actor/grad_norm", "Gradient norm", "before clipping", True),
    Chart("perf/throughput", "Throughput", "tokens trained on per second of a step", True),
)  # fmt: skip


def legend(methods: Sequence[Styled]) -> Markup:
    items = [Markup("<li>{} {}</li>").format(swatch(i), show(method.label)) for i, method in methods]
    return Markup('<ul class="legend" aria-label="methods">{}</ul>').format(Markup("").join(items))


def charts_of(methods: Sequence[Styled]) -> list[Chart]:
    """Accuracies first, whatever sets were evaluated, the first of them also against what it cost; then the fixed
    list."""
    runs = [run for _, method in methods for run in method.runs]
    found = evaluations(runs)
    first = [Chart(m, f"Accuracy, {name}", "share of problems answered right", True) for m, name in found]
    spent = [
        Chart(m, f"Accuracy, {name}, by {axis.name}", about, True, axis=axis)
        for m, name in found[:1]
        for axis, about in compute_axes(runs).items()
        if any(axis.places(run) for run in runs)
    ]
    about = "mean score of the policy's own samples, before its weight in the sum"
    terms = [Chart(metric, f"Reward {name}, on-policy", about, True) for metric, name in components(runs)]
    return [*first[:1], *spent, *first[1:], *CHARTS[:1], *terms, *CHARTS[1:]]


def chart_grid(
    charts: Sequence[Chart], methods: Sequence[Styled], remarks: list[str], smoothing: float = 0.0
) -> Markup:
    """All charts that have values; ``remarks`` gets a line on those that have none and on those thinned out."""
    figures = [_figure(chart, methods, remarks, smoothing) for chart in charts]
    missing = [chart.title.lower() for chart, figure in zip(charts, figures, strict=True) if not figure]
    if missing:
        remarks.append(f"No chart for want of values: {', '.join(missing)}.")
    return Markup('<div class="charts">{}</div>').format(Markup("").join(figures))


def family_charts(chart: Chart, methods: Sequence[Styled], remarks: list[str], smoothing: float = 0.0) -> Markup:
    """The same chart once for each family of methods, all others in grey behind; nothing where no run has a value."""
    lines = _lines(chart, methods, remarks, smoothing)
    last = _end(chart, methods)
    labels = [method.label for _, method in methods]
    figures = []
    for family, members in families(methods).items():
        styles = {style for style, _ in members}
        own = [line for line in lines if line.style in styles]
        behind = [line for line in lines if line.style not in styles]
        if own:
            title = f"{family}: {chart.title}"
            picture = line_chart(own, last, title, chart.from_zero, labels, behind, chart.axis.name)
            figures.append(_framed(chart.name, family, chart.title, own, picture))
    return Markup('<div class="charts">{}</div>').format(Markup("").join(figures)) if figures else Markup("")


def _end(chart: Chart, methods: Sequence[Styled]) -> float:
    """How far the axis goes."""
    return max((x for _, method in methods for run in method.runs for x in chart.axis.places(run).values()), default=0)


def _figure(chart: Chart, methods: Sequence[Styled], remarks: list[str], smoothing: float) -> Markup:
    """One chart, or nothing where no run has a value."""
    lines = _lines(chart, methods, remarks, smoothing)
    if not lines:
        return Markup("")
    labels = [method.label for _, method in methods]
    picture = line_chart(lines, _end(chart, methods), chart.title, chart.from_zero, labels, axis=chart.axis.name)
    return _framed(chart.name, chart.title, chart.about, lines, picture)


def _lines(chart: Chart, methods: Sequence[Styled], remarks: list[str], smoothing: float) -> list[Line]:
    """A line for each method that has values; ``remarks`` gets one where curves are thinned out."""
    raw = [[chart.points(run) for run in method.runs] for _, method in methods]
    present = [curve for curves in raw for curve in curves if curve]
    if chart.axis is STEPS:
        thinned, width = thin_out(present)
    else:  # a place on a cost axis is one run's alone
        each = [thin_out([curve]) for curve in present]
        thinned, width = [curve for (curve,), _ in each], max((width for _, width in each), default=1)
    if width > 1:
        points = "steps" if chart.axis is STEPS else "points of a run"
        remarks.append(
            f"{chart.title}: more than {MOST_POINTS} {points}, so each point is a mean over {width} of them."
        )
    rest = iter(thinned)
    lines = []
    for (style, method), curves in zip(methods, raw, strict=True):
        drawn = [next(rest) for curve in curves if curve]
        if drawn:
            strength = smoothing if chart.axis is STEPS else 0.0
            spread = envelope([smooth(curve, strength) for curve in drawn])
            lines.append(Line(method.label, style, drawn, spread, smoothed=strength > 0))
    return lines


def _framed(metric: str, title: str, about: str, lines: Sequence[Line], picture: Markup) -> Markup:
    data = json.dumps(hover_data(lines), separators=(",", ":")).replace("<", "\\u003c")
    return Markup(
        '<figure data-chart="{}"><figcaption><b>{}</b> <span class="sub">{}</span></figcaption>{}'
        '<script type="application/json">{}</script></figure>'
    ).format(metric, title, about, picture, Markup(data))
