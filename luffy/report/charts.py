"""Which metrics are drawn, and the grid of their charts: the same in the report and on the live page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from luffy.report.curves import FEW_SEEDS, MOST_POINTS, envelope, estimate, smooth, thin_out
from luffy.report.methods import Method, families
from luffy.report.svg import DotRow, Line, dot_plot, hover_data, line_chart
from luffy.report.tables import STEP_SECONDS, borders, components, evaluations
from luffy.report.templates import macro
from luffy.run_folder.runs import RunRecord, first_stage, is_number


def samples_rollouts(run: RunRecord) -> bool:
    """Whether the run is one of RL."""
    return run.kind == "train"


def has_traces(run: RunRecord) -> bool:
    """Whether the run trains on traces. Gates and the replay may bring some if ``guidance.n_prefix`` is 0."""
    return run.config.get("guidance.n_prefix") != 0 or any(row.get("batch/off_solved") for row in run.rows)


def by_step(run: RunRecord) -> dict[int, float]:
    """The step itself."""
    return {int(row["step"]): int(row["step"]) for row in run.rows}


def process_seconds(run: RunRecord) -> dict[int, float]:
    """Seconds of all processes up to each step."""
    return _added_up(run, STEP_SECONDS, lambda stage: stage.processes)


def update_tokens(run: RunRecord) -> dict[int, float]:
    """Tokens trained on up to each step."""
    return _added_up(run, "perf/update_tokens", lambda stage: 1)


def _added_up(run: RunRecord, metric: str, times: Callable[[RunRecord], int], stages: int = 4) -> dict[int, float]:
    """Sum of a metric up to each step, on top of the run whose model it started from; empty if it was not recorded."""
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
    """An x axis: ``places`` maps each step of a run to its position."""

    name: str
    places: Callable[[RunRecord], Mapping[int, float]]


STEPS = Axis("step", by_step)


def compute_axes(runs: Sequence[RunRecord]) -> dict[Axis, str]:
    """Axes of cost for the first chart, each with its description."""
    seconds = {Axis("GPU seconds", process_seconds): "each process is a GPU, or a CPU run; earlier stages included"}
    if runs and all(run.on_cpu for run in runs):
        seconds = {Axis("seconds", process_seconds): "of all processes together, earlier stages included"}
    return seconds | {Axis("tokens", update_tokens): "in updates, earlier stages included"}


@dataclass(frozen=True)
class Chart:
    """A metric to draw. Metrics without data are omitted, but early records of 0.1.0 have 0 there: if 0 cannot be a
    real value it is no point (``zero_is_empty``). ``of`` tells which runs can have the metric (None: all)."""

    metric: str
    title: str
    about: str
    from_zero: bool = False
    zero_is_empty: bool = False
    of: Callable[[RunRecord], bool] | None = None
    axis: Axis = STEPS

    @property
    def name(self) -> str:
        return self.metric if self.axis is STEPS else f"{self.metric} by {self.axis.name}"

    def points(self, run: RunRecord) -> list[tuple[float, float]]:
        """(position, value) of each step that has the metric."""
        if self.of is not None and not self.of(run):
            return []
        at = self.axis.places(run)
        return [(at[step], y) for step, y in run.series(self.metric) if (y or not self.zero_is_empty) and step in at]


CHARTS = (
    Chart("critic/rewards/mean", "Reward, on-policy", "mean reward of on-policy samples", True),
    Chart("batch/off_solved", "Reward, off-policy", "fraction of guided samples that are correct", True, of=has_traces),
    Chart("batch/rejected", "Filtered groups", "left out of the update: all correct or all incorrect", True,
          of=samples_rollouts),
    Chart("actor/entropy_loss", "Entropy", "mean entropy of the policy per token, in nats", True, True),
    Chart("response_length/mean", "Response length", "tokens; in SFT, of the traces"),
    Chart("actor/off_policy_prob", "Off-policy probability", "of teacher tokens in the RL term, under the policy", True,
          True),
    Chart("actor/pg_clipfrac", "Clip fraction", "fraction of ratios beyond the clip range", True, of=samples_rollouts),
    Chart("actor/sft_loss", "SFT loss", "negative log-likelihood per trace token, in nats", True, True),
    Chart("actor/grad_norm", "Gradient norm", "before clipping", True),
    Chart("perf/throughput", "Throughput", "tokens trained on per second of a step", True),
)  # fmt: skip


HELD_OUT_LOSS = Chart("val-traces/loss", "Held-out loss", "negative log-likelihood per token of held-out traces")


def charts_of(methods: Sequence[Method]) -> list[Chart]:
    """Accuracies of all evaluated sets, the first of them also against its cost; then the fixed list."""
    runs = [run for method in methods for run in method.runs]
    found = evaluations(runs)
    first = [Chart(m, f"Accuracy, {name}", "fraction of problems answered correctly", True) for m, name in found]
    spent = [
        Chart(m, f"Accuracy, {name}, by {axis.name}", about, True, axis=axis)
        for m, name in found[:1]
        for axis, about in compute_axes(runs).items()
        if any(axis.places(run) for run in runs)
    ]
    about = "mean reward of on-policy samples, before its weight in the sum"
    terms = [Chart(metric, f"Reward {name}, on-policy", about, True) for metric, name in components(runs)]
    loss = [HELD_OUT_LOSS] if any(HELD_OUT_LOSS.metric in run.metrics for run in runs) else []
    return [*first[:1], *spent, *first[1:], *loss, *CHARTS[:1], *terms, *CHARTS[1:]]


def chart_grid(
    charts: Sequence[Chart], methods: Sequence[Method], remarks: list[str], smoothing: float = 0.0
) -> Markup:
    """All charts that have values; ``remarks`` gets a line on those that have none and on those thinned out."""
    drawn = [(chart, _lines(chart, methods, remarks, smoothing)) for chart in charts]
    missing = [chart.title.lower() for chart, lines in drawn if not lines]
    if missing:
        remarks.append(f"No data for: {', '.join(missing)}.")
    figures = [_figure(chart, methods, lines, [], chart.title, chart.about) for chart, lines in drawn if lines]
    return macro("grid", figures)


def family_charts(chart: Chart, methods: Sequence[Method], remarks: list[str], smoothing: float = 0.0) -> Markup:
    """The same chart once for each category of methods, all others in grey behind; nothing if no run has a value."""
    lines = _lines(chart, methods, remarks, smoothing)
    figures = []
    for family, members in families(methods).items():
        styles = {method.style for method in members}
        own = [line for line in lines if line.style in styles]
        behind = [line for line in lines if line.style not in styles]
        if own:
            figures.append(_figure(chart, methods, own, behind, family, chart.title))
    return macro("grid", figures) if figures else Markup("")


def _figure(
    chart: Chart, methods: Sequence[Method], lines: list[Line], behind: list[Line], title: str, about: str
) -> Markup:
    end = max((x for method in methods for run in method.runs for x in chart.axis.places(run).values()), default=0)
    name = f"{title}: {chart.title}" if behind or title != chart.title else title
    labels = [method.label for method in methods]
    drawn = {line.label for line in lines}
    runs = [run for method in methods if method.label in drawn for run in method.runs]
    picture = line_chart(lines, end, name, chart.from_zero, labels, behind, chart.axis.name, _borders(chart.axis, runs))
    data = Markup(json.dumps(hover_data(lines), separators=(",", ":")).replace("<", "\\u003c"))
    return macro("figure", title, about, picture, metric=chart.name, data=data)


def _borders(axis: Axis, runs: Sequence[RunRecord]) -> list[tuple[float, str]]:
    """Where stages end on the axis, each with the name of the next."""
    found = [(axis.places(run), borders([run])) for run in runs]
    return sorted({(places[step], name) for places, ends in found for step, name in ends.items() if step in places})


def _lines(chart: Chart, methods: Sequence[Method], remarks: list[str], smoothing: float) -> list[Line]:
    """A line for each method that has values; ``remarks`` gets one if curves are thinned out."""
    raw = [[chart.points(run) for run in method.runs] for method in methods]
    present = [curve for curves in raw for curve in curves if curve]
    if chart.axis is STEPS:
        thinned, width = thin_out(present)
    else:  # a position on a cost axis belongs to one run
        each = [thin_out([curve]) for curve in present]
        thinned, width = [curve for (curve,), _ in each], max((width for _, width in each), default=1)
        smoothing = 0.0
    if width > 1:
        points = "steps" if chart.axis is STEPS else "points of a run"
        remarks.append(
            f"{chart.title}: more than {MOST_POINTS} {points}, so each point is a mean over {width} of them."
        )
    rest = iter(thinned)
    lines = []
    for method, curves in zip(methods, raw, strict=True):
        drawn = [next(rest) for curve in curves if curve]
        if drawn:
            spread = envelope([smooth(curve, smoothing) for curve in drawn])
            lines.append(Line(method.label, method.style, drawn, spread, smoothed=smoothing > 0))
    return lines


def accuracy_dots(methods: Sequence[Method]) -> Markup:
    """One dot plot for each evaluated set, the methods in the order given; nothing without evaluations."""
    figures = []
    for metric, name in evaluations([run for method in methods for run in method.runs]):
        rows = [DotRow(m.label, m.style, values) for m in methods if (values := final_values(m, metric))]
        title, about = f"Final accuracy, {name}", "fraction of problems answered correctly"
        if any(len(row.values) > 1 for row in rows):
            few = all(len(row.values) < FEW_SEEDS for row in rows)
            about += f"; large: mean, small: seeds, line: {'their range' if few else '95 % interval'}"
        figures.append(macro("figure", title, about, dot_plot(rows, title), kind="dots"))
    return macro("grid", figures) if figures else Markup("")


def by_accuracy(methods: Sequence[Method]) -> list[Method]:
    """The highest mean of the last held-out accuracies first; methods without evaluations last."""
    metrics = evaluations([run for method in methods for run in method.runs])

    def final_mean(method: Method, metric: str) -> float:
        found = estimate(final_values(method, metric))
        return -1.0 if found is None else found.mean

    return sorted(methods, key=lambda method: [-final_mean(method, metric) for metric, _ in metrics])


def final_values(method: Method, metric: str) -> list[float]:
    """The last value of each run that recorded the metric."""
    return [value for run in method.runs if (value := run.last(metric)) is not None]
