"""How much of a trace a sample starts from: pure functions of step, problem and seed.

The same seed and step give the same ratios on any number of ranks and after a resume, because the
random ones are drawn from a generator made of (seed, step, problem) and nothing else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from luffy.errors import UserError
from luffy.registry import Registry

WINDOWS = 10
CHUNKS = 5  # of a trace, under binomial
TINY = 1e-9  # what rounding may add
Interval = tuple[float, float]
Draw = Callable[[random.Random], float]
PrefixSchedule = Callable[[float, float, float], "Interval | float | Draw"]

SCHEDULES: Registry[PrefixSchedule] = Registry("prefix schedule")


def prefix_schedule(name: str) -> Callable[[PrefixSchedule], PrefixSchedule]:
    """A decorator that registers a schedule for ``guidance.strategy``.

    ``schedule(done, low, high)`` returns the ratio, the interval from which one is drawn, or a function that draws one
    (0 to 1) with the ``random.Random`` it gets, at the share ``done`` of ``guidance.prefix_steps``; ``low`` and
    ``high`` are ``guidance.min_ratio`` and ``guidance.max_ratio``.
    """
    return SCHEDULES.register(name)


@dataclass(frozen=True)
class RatioSchedule:
    """``RatioSchedule("fixed", 1.0, 1.0)`` is the paper's: every prefix sample is a whole trace."""

    strategy: str = "fixed"
    min_ratio: float = 1.0
    max_ratio: float = 1.0
    prefix_steps: float = 1
    shared: bool = False

    def ratios(self, count: int, step: int, key: str) -> list[float]:
        """One ratio for each of ``count`` prefix samples of a problem; ``key`` names problem and seed."""
        if self.strategy == "fixed":
            return evenly_spaced(self.min_ratio, self.max_ratio, count)
        rng = random.Random(f"prefix:{key}:{step}")
        draw = self._draw(step)
        if self.shared:
            return [draw(rng)] * count
        return [draw(rng) for _ in range(count)]

    def _draw(self, step: int) -> Draw:
        """What draws a ratio at this step."""
        found = SCHEDULES[self.strategy](min(step / self.prefix_steps, 1.0), self.min_ratio, self.max_ratio)
        if callable(found):
            return lambda rng: self._checked(found(rng), step)[0]
        low, high = self._checked(found, step)
        return lambda rng: rng.uniform(low, high)

    def _checked(self, found: Interval | float, step: int) -> Interval:
        low, high = found if isinstance(found, tuple) else (found, found)
        if not -TINY <= low <= high <= 1 + TINY:
            raise UserError(
                f"'guidance.strategy' {self.strategy}: gave {found} at step {step}; a ratio is between 0 and 1"
            )
        return low, high


@prefix_schedule("random")
def _random(done: float, low: float, high: float) -> Interval:
    return low, high


@prefix_schedule("linear")
def _linear(done: float, low: float, high: float) -> float:
    return high * (1 - done)


@prefix_schedule("cosine")
def _cosine(done: float, low: float, high: float) -> float:
    return _half_cosine(done, low, high)


@prefix_schedule("cosine_min")
def _cosine_min(done: float, low: float, high: float) -> Interval:
    return _half_cosine(done, low, high), high


@prefix_schedule("binomial")
def _binomial(done: float, low: float, high: float) -> float | Draw:
    """A number of chunks, each kept with a chance that falls from 0.95 to 0.05 along a cosine; then none."""
    if done >= 1:
        return low
    chance = _half_cosine(done, 0.05, 0.95)
    return lambda rng: low + (high - low) * sum(rng.random() < chance for _ in range(CHUNKS)) / CHUNKS


@prefix_schedule("linear_max")
def _linear_max(done: float, low: float, high: float) -> Interval:
    return low, high - (high - low) * _window(done) / WINDOWS


@prefix_schedule("reverse_linear")
def _reverse_linear(done: float, low: float, high: float) -> Interval:
    return low, low + (high - low) * (_window(done) + 1) / WINDOWS


def _half_cosine(done: float, low: float, high: float) -> float:
    """From high to low."""
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * done))


def _window(done: float) -> int:
    return min(int(done * WINDOWS), WINDOWS - 1)


def evenly_spaced(low: float, high: float, count: int) -> list[float]:
    """``count`` ratios from low to high; a single one is the high end."""
    return [low + (high - low) * i / (count - 1) for i in range(count - 1)] + [high]  # exactly: 1 is the whole trace
