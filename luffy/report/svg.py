"""Charts as SVG: scales, ticks, lines over steps, and dots of final values.

Colours (see ``methods.py``) come from the style sheet by class (``m0`` ... ``m7``), so that a chart follows the
page from light to dark. Dashes tell methods apart when colours cannot (grey print, colour blindness).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from luffy.report.curves import FEW_SEEDS, Curve, Envelope, estimate
from luffy.report.methods import COLOURS
from luffy.report.templates import macro
from luffy.report.text import LARGE, number, shorten_middle

WIDTH, HEIGHT = 380, 226  # about what a phone shows, so that text keeps its size there
TOP, BOTTOM = 10, 36
LETTER = 6.1  # mean width of a letter of the labels
LABEL_GAP = 13.0  # between lines of text
LONGEST_LABEL, LONGEST_NAME = 16, 20  # letters: beside a line, in front of a row of dots
MOST_NAMED = 4  # borders: more would lie over each other
MOST_LABELS = 12  # beyond that the legend of the page has to do
FLATTEST = 0.1  # least span of the value axis, as a fraction of the values
MARKED_POINTS = 20  # a curve with so few points shows each of them
ROW = 17.0  # height of a row of dots
FIGURE_WIDTH = 36.0  # of a mean written at the right


@dataclass(frozen=True)
class Line:
    """One method in a chart: a thin line for each seed, their mean, and the range between them.

    ``smoothed``: mean and range are; the thin lines are as recorded, so a single seed has one too.
    """

    label: str
    style: int
    seeds: Sequence[Curve]
    envelope: Envelope
    smoothed: bool = False


@dataclass(frozen=True)
class DotRow:
    """One method: its style, and the last value of each seed (at least one)."""

    label: str
    style: int
    values: Sequence[float]


@dataclass(frozen=True)
class Scale:
    """Data to picture: ``low`` at ``start``, ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def crowded(methods: Sequence[object]) -> bool:
    """Whether there are more methods than colours."""
    return len(methods) > len(COLOURS)


def nice_ticks(low: float, high: float, wanted: int = 5, whole: bool = False) -> list[float]:
    """About ``wanted`` round numbers from at or below ``low`` to at or above ``high``; the span must not be empty.
    They are 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 12 - min(math.floor(math.log10(step)), 0)
    return [round(i * step, digits) for i in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """All with the decimals that their distance needs; thousands as k, millions as M. If more than six decimals or nine
    digits of millions would be needed, all have the same power of ten."""
    largest = max(abs(t) for t in ticks)
    unit, suffix = next(((u, s) for u, s in ((1e6, "M"), (1e3, "k")) if largest >= 10 * u), (1.0, ""))
    gap = (ticks[1] - ticks[0]) / unit if len(ticks) > 1 else 1.0
    digits = max(-math.floor(math.log10(gap) + 1e-9), 0)
    if digits > 6 or largest >= LARGE:
        power = math.floor(math.log10(largest) + 1e-9)
        gap *= unit / 10.0**power
        unit, suffix, digits = 10.0**power, f"e{power}", max(-math.floor(math.log10(gap) + 1e-9), 0)
    return [f"{t / unit:,.{digits}f}{suffix if t else ''}".replace("-", "\u2212") for t in ticks]


def value_ticks(lines: Sequence[Line], from_zero: bool) -> list[float]:
    """Ticks of the value axis."""
    values = [y for line in lines for curve in line.seeds for _, y in curve]
    low, high = min(values), max(values)
    if from_zero or 0 <= low < 0.35 * high:  # near zero anyway: show how near
        low, high = min(low, 0.0), max(high, 0.0)
    magnitude = max(abs(low), abs(high))
    if magnitude < 1e-300:  # a step between ticks would be 0
        return [0.0, 0.5, 1.0]
    room = max(FLATTEST * magnitude - (high - low), 0) / 2  # noise in the last digits should look like noise
    return nice_ticks(low - room, high + room, 5)


def line_chart(
    lines: Sequence[Line],
    last: float,
    name: str,
    from_zero: bool = False,
    labels_of: Sequence[str] = (),
    behind: Sequence[Line] = (),
    axis: str = "step",
    borders: Sequence[tuple[float, str]] = (),
) -> Markup:
    """The chart of one metric from 0 to ``last`` on an axis of that name; ``lines`` hold at least one point.
    ``labels_of`` are the labels of all charts beside it: with the same room for them, the same step is at the same
    place in each. Of lines ``behind``, the means are drawn, in grey and without labels. ``borders``: places on the axis
    with the name of what begins there."""
    ticks = value_ticks([*lines, *behind], from_zero)
    labels = tick_labels(ticks)
    named = len(lines) <= MOST_LABELS
    room = [*labels_of, *(line.label for line in lines)]
    right = 22 + LETTER * max(len(shorten_middle(label, LONGEST_LABEL)) for label in room) if named else 12
    x = Scale(0, max(last, 1), 12 + LETTER * max(map(len, labels)), WIDTH - right)
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    steps = [t for t in nice_ticks(x.low, x.high, 5, whole=True) if t <= x.high]
    greys = [_points(line.envelope.steps, line.envelope.mean, x, y) for line in behind]
    return macro(
        "line_chart", WIDTH, HEIGHT, x, y, axis, describe(lines, name, axis),
        x_ticks=list(zip(steps, tick_labels(steps), strict=True)),
        y_ticks=list(zip(ticks, labels, strict=True)),
        behind=[_path(points) for points in greys if len(points) > 1],
        lines=[_drawn(line, x, y, alone=crowded(lines)) for line in lines],
        ends=_end_labels(lines, x, y) if named else [],
        borders=[(x(at), shorten_middle(text, LONGEST_LABEL) if len(borders) <= MOST_NAMED else "")
                 for at, text in borders if at < x.high],
    )  # fmt: skip


def describe(lines: Sequence[Line], name: str, axis: str = "step") -> str:
    """The picture in words, for screen readers."""
    parts = []
    for line in lines:
        e = line.envelope
        if e.steps:
            ends = [f"{axis} {x:g}" if axis == "step" else f"{number(x)} {axis}" for x in (e.steps[0], e.steps[-1])]
            parts.append(
                f"{line.label} goes from {number(e.mean[0])} at {ends[0]} to {number(e.mean[-1])} at {ends[1]}"
            )
    return f"{name}{' over training steps' if axis == 'step' else ''}. " + "; ".join(parts) + "."


def hover_data(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Data for the read-out under the pointer: the mean of each line, and its range if it has several seeds."""
    found = []
    for line in lines:
        e = line.envelope
        if e.steps:
            steps = tuple(x if isinstance(x, int) else float(f"{x:.5g}") for x in e.steps)
            named = {"mean": e.mean} | ({"low": e.low, "high": e.high} if len(line.seeds) > 1 else {})
            values = {name.replace("mean", "y"): [float(f"{v:.4g}") for v in column] for name, column in named.items()}
            found.append({"label": line.label, "style": line.style % len(COLOURS), "x": steps, **values})
    return found


def _points(steps: Iterable[float], values: Iterable[float], x: Scale, y: Scale) -> list[tuple[float, float]]:
    return [(x(s), y(v)) for s, v in zip(steps, values, strict=True)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _drawn(line: Line, x: Scale, y: Scale, alone: bool) -> dict[str, Any]:
    """Paths of a line: its mean, with dots if there are few, and unless it is drawn ``alone`` its seeds and range."""
    e, several = line.envelope, len(line.seeds) > 1
    mean = _points(e.steps, e.mean, x, y)
    band = _points(e.steps, e.high, x, y) + _points(e.steps, e.low, x, y)[::-1]
    seeds = [_path([(x(s), y(v)) for s, v in curve]) for curve in line.seeds if len(curve) > 1]
    return {
        "style": line.style,
        "band": _path(band) if several and len(mean) > 1 and not alone else "",
        "seeds": "".join(seeds) if (several or line.smoothed) and not alone else "",
        "mean": _path(mean) if len(mean) > 1 else "",
        "dots": mean if len(mean) <= MARKED_POINTS else [],
    }


def _end_labels(lines: Sequence[Line], x: Scale, y: Scale) -> list[dict[str, Any]]:
    ends = [(line, *_end_of(line)) for line in lines]
    shown = sorted(((y(v), x(s), line) for line, s, v in ends if not math.isnan(v)), key=lambda end: end[0])
    places = spread_out([at for at, _, _ in shown], TOP + 4, HEIGHT - BOTTOM - 2)
    begin, labels = x.end + 4, []
    for (at, end, line), place in zip(shown, places, strict=True):
        led = abs(place - at) > 3 and end >= x.end - 3  # from farther off a leader would cross the chart
        labels.append(
            {
                "line": line,
                "place": place,
                "short": shorten_middle(line.label, LONGEST_LABEL),
                "lead": _path([(end, at), (begin, place)]) if led else "",
                "sign": _path([(begin, place), (begin + 10, place)]),
            }
        )
    return labels


def _end_of(line: Line) -> tuple[float, float]:
    """Where the line ends: its mean, or its longest seed if the seeds have no steps in common."""
    if line.envelope.steps:
        return line.envelope.steps[-1], line.envelope.mean[-1]
    return max((curve[-1] for curve in line.seeds if curve), default=(0.0, math.nan))


def spread_out(wanted: Sequence[float], low: float, high: float, gap: float = LABEL_GAP) -> list[float]:
    """Places in the same order, at least ``gap`` apart and within bounds, close to the (sorted) wanted ones."""
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    places = [min(max(at, low), high) for at in wanted]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    if places:
        places[-1] = min(places[-1], high)
    for i in range(len(places) - 2, -1, -1):
        places[i] = min(places[i], places[i + 1] - gap)
    return places


def dot_plot(rows: Sequence[DotRow], name: str) -> Markup:
    """Values of at least 0 on an axis from 0 on; intervals are cut off where they leave it."""
    ticks = nice_ticks(0.0, max([value for row in rows for value in row.values] + [0.1]), 5)
    left = 10 + LETTER * max(len(shorten_middle(row.label, LONGEST_NAME)) for row in rows)
    x = Scale(ticks[0], ticks[-1], left, WIDTH - FIGURE_WIDTH - 6)
    base = 6 + ROW * len(rows)
    said = "; ".join(f"{row.label} {number(sum(row.values) / len(row.values))}" for row in rows)
    few = all(len(row.values) < FEW_SEEDS for row in rows)
    drawn = [_dots(row, x, 6 + ROW * (i + 0.5), few) for i, row in enumerate(rows)]
    labels = list(zip(ticks, tick_labels(ticks), strict=True))
    return macro("dot_plot", WIDTH, base + 20, x, base, f"{name}: {said}.", labels, drawn)


def _dots(row: DotRow, x: Scale, y: float, few: bool) -> dict[str, Any]:
    found = estimate(row.values)
    assert found is not None, "a row has values"
    half = found.half_width or 0.0
    low, high = (found.low, found.high) if few else (found.mean - half, found.mean + half)
    return {
        "label": row.label,
        "short": shorten_middle(row.label, LONGEST_NAME),
        "style": row.style,
        "y": y,
        "low": max(low, x.low),
        "high": min(high, x.high),
        "mean": found.mean,
        "dots": [(value, 2.0) for value in row.values if len(row.values) > 1] + [(found.mean, 3.6)],
    }
