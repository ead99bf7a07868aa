"""Statistics over seeds: intervals for the table, mean and range for the curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist, fmean, stdev

import numpy as np

Curve = Sequence[tuple[float, float]]

MOST_POINTS = 200  # of a curve: a chart is some 270 pixels wide, and more would be a smear

FEW_SEEDS = 5  # below: Student's t needs 2.8 standard errors and more, and nothing says that seeds are normal
# two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom
_T95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


def t_quantile_95(freedom: int) -> float:
    """The 0.975 quantile of Student's t; beyond the table, its expansion around the normal one."""
    if freedom < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, got {freedom}")
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` seeds, the half width of its 95 % interval, and the lowest and highest seed; one seed has no
    interval. Of few seeds the interval is wider than the range of what is measured."""

    mean: float
    half_width: float | None
    n: int
    low: float
    high: float

    @property
    def few(self) -> bool:
        """Whether the seeds themselves tell more than an interval."""
        return self.n < FEW_SEEDS


def estimate(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    n = len(values)
    half = t_quantile_95(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else None
    return Estimate(fmean(values), half, n, min(values), max(values))


def thin_out(curves: Sequence[Curve], limit: int = MOST_POINTS) -> tuple[list[Curve], int]:
    """Curves of at most ``limit`` points, and the number of steps that each point is a mean of (1: unchanged). All
    curves share the bins, so that seeds stay comparable point by point."""
    steps = sorted({x for curve in curves for x, _ in curve})
    width = math.ceil(len(steps) / limit)
    if width <= 1:
        return [list(curve) for curve in curves], 1
    bin_of = {x: i // width for i, x in enumerate(steps)}
    ends = {i // width: x for i, x in enumerate(steps)}
    binned = [groupby(curve, key=lambda point: bin_of[point[0]]) for curve in curves]
    return [[(ends[b], fmean(y for _, y in points)) for b, points in bins] for bins in binned], width


def smooth(curve: Curve, strength: float) -> Curve:
    """The exponential moving average whose weights fall by ``strength`` a step; 0 leaves the curve as it is.

    By step and not by point: a metric of every tenth step has little noise to remove, and would lag far behind one of
    every step. Divided by the sum of its weights, so that it starts at the first value and not near zero.
    """
    if not 0 <= strength < 1:
        raise ValueError(f"a smoothing strength is at least 0 and below 1, got {strength}")
    total = weight = before = 0.0
    out = []
    for x, y in curve:
        kept = strength ** (x - before) if weight else 0.0
        total, weight, before = kept * total + y, kept * weight + 1.0, x
        out.append((x, total / weight))
    return out


@dataclass(frozen=True)
class Envelope:
    """Mean, lowest and highest over seeds at each step."""

    steps: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def envelope(curves: Sequence[Curve]) -> Envelope:
    """The envelope over the steps that every curve spans, so that the mean does not jump where a shorter run ends. A
    step that one seed skipped (no update, so no entropy) is interpolated."""
    present = [curve for curve in curves if curve]
    if not present:
        return Envelope((), (), (), ())
    first, last = max(c[0][0] for c in present), min(c[-1][0] for c in present)
    steps = sorted({x for curve in present for x, _ in curve if first <= x <= last})
    seeds = [np.interp(steps, [x for x, _ in curve], [y for _, y in curve]).tolist() for curve in present]
    columns = list(zip(*seeds, strict=True))
    return Envelope(tuple(steps), tuple(map(fmean, columns)), tuple(map(min, columns)), tuple(map(max, columns)))
