"""Which metrics are drawn, and the grid of their charts: the same in the report and on the live page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from luffy.report.curves import MOST_POINTS, envelope, smooth, thin_out
from luffy.report.families import families
from luffy.report.figures import Line, hover_data, line_chart, swatch
from luffy.report.methods import Styled
from luffy.report.runs import Points, RunRecord
from luffy.report.tables import evaluations
from luffy.report.text import show


def always(run: RunRecord) -> bool:
    return True


def samples_rollouts(run: RunRecord) -> bool:
    return run.kind == "train"


def is_guided(run: RunRecord) -> bool:
    return run.kind == "train" and run.config.get("guidance.n_prefix") != 0


@dataclass(frozen=True)
class Chart:
    """A metric to draw. An empty mean is recorded as 0, so where 0 cannot be a real value it is no point,
    and where it can, ``of`` says which runs have the metric at all."""

    metric: str
    title: str
    about: str
    from_zero: bool = False
    zero_is_empty: bool = False
    of: Callable[[RunRecord], bool] = always

    def points(self, run: RunRecord) -> Points:
        if not self.of(run):
            return []
        return [(step, value) for step, value in run.series(self.metric) if value or not self.zero_is_empty]


CHARTS = (
    Chart("critic/rewards/mean", "Reward, on-policy", "mean reward of the policy's own samples", True),
    Chart("batch/off_solved", "Reward, off-policy", "share of guided samples that are right", True, of=is_guided),
    Chart("batch/rejected", "Groups without a signal", "left out of the update: all right or all wrong", True,
          of=samples_rollouts),
    Chart("actor/entropy_loss", "Entropy", "mean entropy of the policy per token, in nats", True, True),
    Chart("response_length/mean", "Response length", "tokens; of the traces in SFT"),
    Chart("actor/off_policy_prob", "Off-policy probability", "of teacher tokens under the policy", True, True),
    Chart("actor/pg_clipfrac", "Clip fraction", "share of tokens whose ratio is clipped", True, of=samples_rollouts),
    Chart("actor/sft_loss", "SFT loss", "negative log-likelihood per trace token, in nats", True, True),
    Chart("actor/grad_norm", "Gradient norm", "before clipping", True),
    Chart("perf/throughput", "Throughput", "tokens trained on per second of a step", True),
)  # fmt: skip


def legend(methods: Sequence[Styled]) -> Markup:
    items = [Markup("<li>{} {}</li>").format(swatch(i), show(method.label)) for i, method in methods]
    return Markup('<ul class="legend" aria-label="methods">{}</ul>').format(Markup("").join(items))


def charts_of(methods: Sequence[Styled]) -> list[Chart]:
    """Accuracies first, whatever sets were evaluated, then the fixed list."""
    found = evaluations([run for _, method in methods for run in method.runs])
    first = [Chart(m, f"Accuracy, {name}", "share of problems answered right", True) for m, name in found]
    return [*first, *CHARTS]


def chart_grid(
    charts: Sequence[Chart], methods: Sequence[Styled], remarks: list[str], smoothing: float = 0.0
) -> Markup:
    """All charts that have values; ``remarks`` gets a line on those that have none and on those thinned out."""
    last = max((run.steps for _, method in methods for run in method.runs), default=0)
    figures = [_figure(chart, methods, last, remarks, smoothing) for chart in charts]
    missing = [chart.title.lower() for chart, figure in zip(charts, figures, strict=True) if not figure]
    if missing:
        remarks.append(f"No chart for want of values: {', '.join(missing)}.")
    return Markup('<div class="charts">{}</div>').format(Markup("").join(figures))


def family_charts(chart: Chart, methods: Sequence[Styled], remarks: list[str], smoothing: float = 0.0) -> Markup:
    """The same chart once for each family of methods, all others in grey behind; nothing where no run has a value."""
    last = max((run.steps for _, method in methods for run in method.runs), default=0)
    lines = _lines(chart, methods, remarks, smoothing)
    labels = [method.label for _, method in methods]
    figures = []
    for family, members in families(methods).items():
        styles = {style for style, _ in members}
        own = [line for line in lines if line.style in styles]
        behind = [line for line in lines if line.style not in styles]
        if own:
            picture = line_chart(own, last, f"{family}: {chart.title}", chart.from_zero, labels, behind)
            figures.append(_framed(chart.metric, family, chart.title, own, picture))
    return Markup('<div class="charts">{}</div>').format(Markup("").join(figures)) if figures else Markup("")


def _figure(chart: Chart, methods: Sequence[Styled], last: int, remarks: list[str], smoothing: float) -> Markup:
    """One chart, or nothing where no run has a value."""
    lines = _lines(chart, methods, remarks, smoothing)
    if not lines:
        return Markup("")
    picture = line_chart(lines, last, chart.title, chart.from_zero, [method.label for _, method in methods])
    return _framed(chart.metric, chart.title, chart.about, lines, picture)


def _lines(chart: Chart, methods: Sequence[Styled], remarks: list[str], smoothing: float) -> list[Line]:
    """A line for each method that has values; ``remarks`` gets one where curves are thinned out."""
    raw = [[chart.points(run) for run in method.runs] for _, method in methods]
    thinned, width = thin_out([curve for curves in raw for curve in curves if curve])
    if width > 1:
        remarks.append(f"{chart.title}: more than {MOST_POINTS} steps, so each point is a mean over {width} of them.")
    rest = iter(thinned)
    lines = []
    for (style, method), curves in zip(methods, raw, strict=True):
        drawn = [next(rest) for curve in curves if curve]
        if drawn:
            spread = envelope([smooth(curve, smoothing) for curve in drawn])
            lines.append(Line(method.label, style, drawn, spread, smoothed=smoothing > 0))
    return lines


def _framed(metric: str, title: str, about: str, lines: Sequence[Line], picture: Markup) -> Markup:
    data = json.dumps(hover_data(lines), separators=(",", ":")).replace("<", "\\u003c")
    return Markup(
        '<figure data-chart="{}"><figcaption><b>{}</b> <span class="sub">{}</span></figcaption>{}'
        '<script type="application/json">{}</script></figure>'
    ).format(metric, title, about, picture, Markup(data))
