"""A row of dots for each method: where its seeds ended, their mean and its interval, of few seeds their range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from luffy.report.curves import FEW_SEEDS, estimate
from luffy.report.figures import LETTER, WIDTH, Scale, colour_class, nice_ticks, tick_labels
from luffy.report.method_families import final_values
from luffy.report.methods import Styled
from luffy.report.tables import evaluations
from luffy.report.text import number, shorten_middle

ROW = 17.0  # height of a line of text
TOP, BOTTOM = 6.0, 20.0
LONGEST_NAME = 20
FIGURE_WIDTH = 36.0  # of a mean written at the right


@dataclass(frozen=True)
class DotRow:
    """One method: its place in the colours, and the last value of each seed (at least one)."""

    label: str
    style: int
    values: Sequence[float]


def accuracy_dots(methods: Sequence[Styled]) -> Markup:
    """One plot for each set that was evaluated, the methods in the order given; nothing without evaluations."""
    figures = []
    for metric, name in evaluations([run for _, method in methods for run in method.runs]):
        rows = [DotRow(m.label, style, values) for style, m in methods if (values := final_values(m, metric))]
        title = f"Final accuracy, {name}"
        caption = '<figure class="dots"><figcaption><b>{}</b> <span class="sub">{}</span></figcaption>{}</figure>'
        about = "share of problems answered right"
        if any(len(row.values) > 1 for row in rows):
            few = all(len(row.values) < FEW_SEEDS for row in rows)
            about += f"; large: mean, small: seeds, line: {'their range' if few else '95 % interval'}"
        figures.append(Markup(caption).format(title, about, dot_plot(rows, title)))
    return Markup('<div class="charts">{}</div>').format(Markup("").join(figures)) if figures else Markup("")


def dot_plot(rows: Sequence[DotRow], name: str) -> Markup:
    """Values of at least 0 on an axis from 0 on; intervals are cut off where they leave it."""
    ticks = nice_ticks(0.0, max([value for row in rows for value in row.values] + [0.1]), 5)
    height = TOP + ROW * len(rows) + BOTTOM
    left = 10 + LETTER * max(len(shorten_middle(row.label, LONGEST_NAME)) for row in rows)
    x = Scale(ticks[0], ticks[-1], left, WIDTH - FIGURE_WIDTH - 6)
    said = "; ".join(f"{row.label} {number(sum(row.values) / len(row.values))}" for row in rows)
    head = '<svg class="chart" viewBox="0 0 {} {:.0f}" role="img" tabindex="0" aria-label="{}">'
    parts = [Markup(head).format(WIDTH, height, f"{name}: {said}."), _axis(x, ticks, height)]
    few = all(len(row.values) < FEW_SEEDS for row in rows)
    parts += [_row(row, x, TOP + ROW * (i + 0.5), few) for i, row in enumerate(rows)]
    return Markup("").join(parts) + Markup("</svg>")


def _axis(x: Scale, ticks: Sequence[float], height: float) -> Markup:
    mark = '<path class="grid" d="M{0:.1f} {1:.1f}V{2:.1f}"/><text class="tick mid" x="{0:.1f}" y="{3:.1f}">{4}</text>'
    base = height - BOTTOM
    labels = zip(ticks, tick_labels(ticks), strict=True)
    return Markup("").join(Markup(mark).format(x(tick), TOP, base, base + 15, label) for tick, label in labels)


def _row(row: DotRow, x: Scale, y: float, few: bool) -> Markup:
    found = estimate(row.values)
    assert found is not None, "a row has values"
    half = found.half_width or 0.0
    low, high = (found.low, found.high) if few else (found.mean - half, found.mean + half)
    low, high = max(low, x.low), min(high, x.high)
    text = '<text class="label end" x="{:.1f}" y="{:.1f}" dy="3.8"><title>{}</title>{}</text>'
    parts = [Markup(text).format(x.start - 8, y, row.label, shorten_middle(row.label, LONGEST_NAME))]
    parts.append(Markup('<path class="grid" d="M{:.1f} {:.1f}H{:.1f}"/>').format(x.start, y, x.end))
    span = '<path class="mean {}" d="M{:.1f} {:.1f}H{:.1f}"/>'
    parts.append(Markup(span).format(colour_class(row.style), x(low), y, x(high)) if high > low else Markup(""))
    dot = '<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="{}"/>'
    places = [(value, 2.0) for value in row.values if len(row.values) > 1] + [(found.mean, 3.6)]
    parts += [Markup(dot).format(colour_class(row.style), x(value), y, radius) for value, radius in places]
    value = '<text class="tick end" x="{}" y="{:.1f}" dy="3.8">{}</text>'
    return Markup("").join(parts) + Markup(value).format(WIDTH - 2, y, number(found.mean))
