"""Metrics that carry their own reduction, so that parts of unequal size merge exactly.

A mean is a (sum, weight) pair until it is read: no mean of means over micro-batches or ranks. What was not measured
(a mean of nothing) has the value 0, never NaN, and is left out of the record (``measured``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


class Metric(Protocol):
    def merge(self, other: Self) -> Self: ...

    @property
    def value(self) -> float: ...

    @property
    def measured(self) -> bool: ...


@dataclass(frozen=True)
class Mean:
    """``Mean(6.0, 3)`` is 2.0. An empty mean is 0, never NaN."""

    total: float
    weight: float = 1.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    @property
    def measured(self) -> bool:
        return self.weight > 0

    @staticmethod
    def of(values: Iterable[float]) -> Mean:
        items = list(values)
        return Mean(math.fsum(items), len(items))


@dataclass(frozen=True)
class Sum:
    """``count`` is the number of things added up, where that may be 0."""

    total: float
    count: float = 1.0

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total

    @property
    def measured(self) -> bool:
        return self.count > 0


@dataclass(frozen=True)
class Max:
    largest: float = -math.inf

    def merge(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return self.largest if self.measured else 0.0

    @property
    def measured(self) -> bool:
        return self.largest != -math.inf


@dataclass(frozen=True)
class Min:
    smallest: float = math.inf

    def merge(self, other: Min) -> Min:
        return Min(min(self.smallest, other.smallest))

    @property
    def value(self) -> float:
        return self.smallest if self.measured else 0.0

    @property
    def measured(self) -> bool:
        return self.smallest != math.inf


@dataclass(frozen=True)
class EffectiveShare:
    """Effective sample size of weights as a share of their number: (sum w)^2 / (n sum w^2), 1 when all are equal."""

    total: float
    squares: float
    count: float

    def merge(self, other: EffectiveShare) -> EffectiveShare:
        return EffectiveShare(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total**2 / (self.count * self.squares) if self.squares else 0.0

    @property
    def measured(self) -> bool:
        return self.count > 0


@dataclass(frozen=True, eq=False)
class OnDevice:
    """A metric whose numbers are still tensors: ``OnDevice(Mean, (sum, count))``. See ``fetch``."""

    kind: Callable[..., Metric]
    numbers: tuple[Tensor, ...]


def fetch(parts: Sequence[Mapping[str, OnDevice]]) -> dict[str, Metric]:
    """Merged metrics of many micro-batches, with a single transfer from the device."""
    waiting = [(name, metric) for part in parts for name, metric in part.items()]
    if not waiting:
        return {}
    flat = torch.stack([number.double() for _, metric in waiting for number in metric.numbers]).tolist()
    numbers = iter(flat)
    return merge_metrics({name: metric.kind(*[next(numbers) for _ in metric.numbers])} for name, metric in waiting)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def training_seconds(values: Mapping[str, float]) -> float:
    """Seconds of a row of metrics.jsonl: of its step, evaluation and checkpoint."""
    return sum(values.get(f"timing_s/{phase}", 0.0) for phase in ("step", "eval", "save"))


def spread(prefix: str, values: Iterable[float]) -> dict[str, Metric]:
    """``prefix/mean``, ``prefix/max`` and ``prefix/min`` of some numbers."""
    items = list(values)
    return {
        f"{prefix}/mean": Mean.of(items),
        f"{prefix}/max": Max(max(items, default=-math.inf)),
        f"{prefix}/min": Min(min(items, default=math.inf)),
    }
