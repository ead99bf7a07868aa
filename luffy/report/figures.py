"""Charts as SVG text: no library, no script, readable on paper.

Colours (``method_colours.py`` says whose) come from the style sheet by class (``m0`` ... ``m7`` for methods,
``ph-NAME`` for phases), so that a chart follows the page from light to dark. A method has the same colour and dash in
every chart; dashes tell methods apart where colours cannot (grey print, colour blindness).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from luffy.report.curves import Curve, Envelope
from luffy.report.text import LARGE, number, shorten_middle, show_seconds

WIDTH, HEIGHT = 380, 226  # about what a phone shows, so that text keeps its size there
TOP, BOTTOM = 10, 36
LETTER = 6.1  # mean width of a letter of the labels
LABEL_GAP = 13.0  # between lines of text
LONGEST_LABEL = 16
MOST_LABELS = 12  # beyond that the legend of the page has to do
FLATTEST = 0.1  # least span of the value axis, as a share of the values
MARKED_POINTS = 20  # a curve with so few points shows each of them
COLOURS, DASHES = 8, ("", "6 3", "2 2.5", "9 3 2 3")


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
class Scale:
    """Data to picture: ``low`` at ``start``, ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def crowded(methods: Sequence[object]) -> bool:
    """Whether they are more than colours tell apart in one chart."""
    return len(methods) > COLOURS


def nice_step(span: float, wanted: int) -> float:
    """1, 2 or 5 times a power of ten, giving about ``wanted`` ticks over ``span``."""
    rough = span / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))


def nice_ticks(low: float, high: float, wanted: int = 5, whole: bool = False) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``; the span must not be empty."""
    step = nice_step(high - low, wanted)
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
) -> Markup:
    """The chart of one metric from 0 to ``last`` on an axis of that name; ``lines`` hold at least one point.
    ``labels_of`` are the labels of all charts beside it: with the same room for them, the same step is at the same
    place in each. Of lines ``behind``, the means are drawn, in grey and without labels."""
    ticks = value_ticks([*lines, *behind], from_zero)
    labels = tick_labels(ticks)
    named = len(lines) <= MOST_LABELS
    room = [*labels_of, *(line.label for line in lines)]
    right = 22 + LETTER * max(len(shorten_middle(label, LONGEST_LABEL)) for label in room) if named else 12
    left = 12 + LETTER * max(map(len, labels))
    x = Scale(0, max(last, 1), left, WIDTH - right)
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    layers = [
        _grid(x, y, ticks, labels, axis),
        *(_grey(line, x, y) for line in behind),
        *(_band(line, x, y) for line in lines if not crowded(lines)),
        *(_seeds(line, x, y) for line in lines if not crowded(lines)),
        *(_mean(line, x, y) for line in lines),
        _end_labels(lines, x, y) if named else Markup(""),
        Markup('<g class="cross"></g>'),
    ]
    head = (
        '<svg class="chart" viewBox="0 0 {} {}" data-plot="{:.1f} {:.1f} {:.10g}" data-axis="{}" role="img" '
        'tabindex="0" aria-label="{}">'
    )
    opened = Markup(head).format(WIDTH, HEIGHT, x.start, x.end, x.high, axis, describe(lines, name, axis))
    return opened + Markup("").join(layers) + Markup("</svg>")


def describe(lines: Sequence[Line], name: str, axis: str = "step") -> str:
    """What the picture shows, for those who do not see it."""
    parts = []
    for line in lines:
        e = line.envelope
        if e.steps:
            begin, end = number(e.mean[0]), number(e.mean[-1])
            first, last = (
                f"{axis} {x:g}" if axis == "step" else f"{number(x)} {axis}" for x in (e.steps[0], e.steps[-1])
            )
            parts.append(f"{line.label} goes from {begin} at {first} to {end} at {last}")
    return f"{name}{' over training steps' if axis == 'step' else ''}. " + "; ".join(parts) + "."


def hover_data(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """What the read-out under the pointer needs: the mean of each line, and its range where it has one."""
    return [_hover_line(line) for line in lines if line.envelope.steps]


def _hover_line(line: Line) -> dict[str, Any]:
    e = line.envelope
    data: dict[str, Any] = {
        "label": line.label,
        "style": line.style % COLOURS,
        "x": _places(e.steps),
        "y": _short(e.mean),
    }
    return data | ({"low": _short(e.low), "high": _short(e.high)} if len(line.seeds) > 1 else {})


def _places(steps: Sequence[float]) -> tuple[float, ...]:
    return tuple(x if isinstance(x, int) else float(f"{x:.5g}") for x in steps)


def _short(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.4g}") for v in values]


def swatch(style: int) -> Markup:
    """A short piece of a method's line, for legends and tables."""
    return Markup('<svg class="swatch" viewBox="0 0 26 8" aria-hidden="true">{}</svg>').format(
        _stroke([(1, 4), (25, 4)], style)
    )


def colour_class(style: int) -> str:
    return f"m{style % COLOURS}"


def _dash(style: int) -> Markup:
    """Neighbouring methods differ in their dash, and so do methods that share a colour."""
    dash = DASHES[(style + style // COLOURS) % len(DASHES)]
    return Markup(' stroke-dasharray="{}"').format(dash) if dash else Markup("")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _stroke(points: Sequence[tuple[float, float]], style: int) -> Markup:
    return Markup('<path class="mean {}" d="{}"{}/>').format(colour_class(style), _path(points), _dash(style))


def _grid(x: Scale, y: Scale, ticks: Sequence[float], labels: Sequence[str], axis: str) -> Markup:
    out = []
    for tick, label in zip(ticks, labels, strict=True):
        at = f"{y(tick):.1f}"
        out.append(Markup('<path class="grid" d="M{:.1f} {}H{:.1f}"/>').format(x.start, at, x.end))
        out.append(Markup('<text class="tick end" x="{:.1f}" y="{}" dy="3.6">{}</text>').format(x.start - 6, at, label))
    steps = [t for t in nice_ticks(x.low, x.high, 5, whole=True) if t <= x.high]
    for tick, label in zip(steps, tick_labels(steps), strict=True):
        mark = '<path class="axis" d="M{0:.1f} {1:.1f}v4"/><text class="tick mid" x="{0:.1f}" y="{2:.1f}">{3}</text>'
        out.append(Markup(mark).format(x(tick), y.start, y.start + 16, label))
    out.append(Markup('<path class="axis" d="M{:.1f} {:.1f}H{:.1f}"/>').format(x.start, y.start, x.end))
    middle = (x.start + x.end) / 2
    out.append(Markup('<text class="tick mid" x="{:.1f}" y="{:.1f}">{}</text>').format(middle, HEIGHT - 4, axis))
    return Markup("").join(out)


def _grey(line: Line, x: Scale, y: Scale) -> Markup:
    points = [(x(s), y(v)) for s, v in zip(line.envelope.steps, line.envelope.mean, strict=True)]
    return Markup('<path class="behind" d="{}"/>').format(_path(points)) if len(points) > 1 else Markup("")


def _band(line: Line, x: Scale, y: Scale) -> Markup:
    e = line.envelope
    if len(line.seeds) < 2 or len(e.steps) < 2:
        return Markup("")
    upper = [(x(s), y(v)) for s, v in zip(e.steps, e.high, strict=True)]
    lower = [(x(s), y(v)) for s, v in zip(e.steps, e.low, strict=True)]
    return Markup('<path class="band {}" d="{}Z"/>').format(colour_class(line.style), _path(upper + lower[::-1]))


def _seeds(line: Line, x: Scale, y: Scale) -> Markup:
    if len(line.seeds) < 2 and not line.smoothed:
        return Markup("")
    paths = [_path([(x(s), y(v)) for s, v in curve]) for curve in line.seeds if len(curve) > 1]
    return (
        Markup('<path class="seed {}" d="{}"/>').format(colour_class(line.style), "".join(paths))
        if paths
        else Markup("")
    )


def _mean(line: Line, x: Scale, y: Scale) -> Markup:
    e = line.envelope
    points = [(x(s), y(v)) for s, v in zip(e.steps, e.mean, strict=True)]
    drawn = _stroke(points, line.style) if len(points) > 1 else Markup("")
    dots = points if len(points) <= MARKED_POINTS else []
    dot = Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="2.4"/>')
    return drawn + Markup("").join(dot.format(colour_class(line.style), px, py) for px, py in dots)


def _end_labels(lines: Sequence[Line], x: Scale, y: Scale) -> Markup:
    ends = [(line, *_end_of(line)) for line in lines]
    shown = sorted(((y(v), x(s), line) for line, s, v in ends if not math.isnan(v)), key=lambda end: end[0])
    places = spread_out([at for at, _, _ in shown], TOP + 4, HEIGHT - BOTTOM - 2)
    out = []
    for (at, end, line), place in zip(shown, places, strict=True):
        begin = x.end + 4
        if abs(place - at) > 3 and end >= x.end - 3:  # from farther off it would cross the chart
            out.append(Markup('<path class="lead" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(end, at, begin, place))
        out.append(_stroke([(begin, place), (begin + 10, place)], line.style))
        text = '<text class="label" x="{:.1f}" y="{:.1f}" dy="3.8"><title>{}</title>{}</text>'
        out.append(Markup(text).format(begin + 13, place, line.label, shorten_middle(line.label, LONGEST_LABEL)))
    return Markup("").join(out)


def _end_of(line: Line) -> tuple[float, float]:
    """Where the line ends: its mean, or its longest seed where the seeds have no steps in common."""
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


def phase_bar(seconds: Mapping[str, float], longest: float, name: str) -> Markup:
    """One bar of seconds stacked by phase; ``longest`` is the full width."""
    out, at = [], 0.0
    for phase, value in seconds.items():
        width = 100 * value / longest
        rect = '<rect class="{}" x="{:.2f}" y="0" width="{:.2f}" height="10"><title>{}: {} s</title></rect>'
        out.append(Markup(rect).format(phase_class(phase), at, width, phase, show_seconds(value)))
        at += width
    said = ", ".join(f"{phase} {show_seconds(value)}" for phase, value in seconds.items())
    head = '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}: {}">'
    return Markup(head).format(f"{name}, seconds per step", said) + Markup("").join(out) + Markup("</svg>")


KNOWN_PHASES = ("plan", "rollout", "reward", "old_log_probs", "advantage", "record", "pack", "update", "eval", "save")


def phase_class(phase: str) -> str:
    return f"ph ph-{phase}" if phase in KNOWN_PHASES else "ph"
