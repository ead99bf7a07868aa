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
from luffy.registry import NoSettings, Part, Registry
from luffy.schema import knob

TINY = 1e-9  # what rounding may add
Interval = tuple[float, float]
Draw = Callable[[random.Random], float]
ScheduleFunction = Callable[..., "Interval | float | Draw"]


@dataclass(frozen=True)
class PrefixSchedule(Part):
    """What ``prefix_schedule`` registers. ``follows_steps``: its ratios change while the training goes on; ``spreads``:
    the samples of a problem have different ratios, which they cannot share."""

    follows_steps: bool = True
    spreads: bool = False


SCHEDULES: Registry[PrefixSchedule] = Registry("prefix schedule", PrefixSchedule)


def prefix_schedule(
    name: str, settings: type = NoSettings, **facts: bool
) -> Callable[[ScheduleFunction], ScheduleFunction]:
    """Register a schedule for ``guidance.strategy``.

    ``schedule(done, low, high)`` returns the ratio, an interval to sample it from, or a function of a
    ``random.Random`` that samples it. ``done``: finished fraction (0 to 1) of ``guidance.prefix_steps``; ``low``,
    ``high``: ``guidance.min_ratio``, ``guidance.max_ratio``. Settings are a fourth argument.
    """
    return SCHEDULES.register(name, settings=settings, **facts)


@dataclass(frozen=True)
class RatioSchedule:
    """``RatioSchedule("fixed", 1.0, 1.0)`` is the paper's: every prefix sample is a whole trace. ``strategy``: a name,
    or the choice of a config with its settings."""

    strategy: str = "fixed"
    min_ratio: float = 1.0
    max_ratio: float = 1.0
    prefix_steps: float = 1
    shared: bool = False

    def ratios(self, count: int, step: int, key: str) -> list[float]:
        """One ratio for each of ``count`` prefix samples of a problem; ``key`` names problem and seed."""
        if SCHEDULES.known(self.strategy).spreads:
            return evenly_spaced(self.min_ratio, self.max_ratio, count)
        rng = random.Random(f"prefix:{key}:{step}")
        draw = self._draw(step)
        if self.shared:
            return [draw(rng)] * count
        return [draw(rng) for _ in range(count)]

    def _draw(self, step: int) -> Draw:
        """What draws a ratio at this step."""
        schedule = SCHEDULES[self.strategy]
        done, own = min(step / self.prefix_steps, 1.0), schedule.settings_for(self.strategy)
        found = schedule(done, self.min_ratio, self.max_ratio, *own)
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


@prefix_schedule("fixed", follows_steps=False, spreads=True)
def _fixed(done: float, low: float, high: float) -> Interval:
    """Evenly spaced from low to high over the samples of a problem (``evenly_spaced``)."""
    return low, high


@prefix_schedule("random", follows_steps=False)
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


@dataclass(frozen=True)
class Binomial:
    """Settings of binomial."""

    chunks: int = knob(5, "equal chunks of a trace, each kept with the same chance", ge=1)


@prefix_schedule("binomial", settings=Binomial)
def _binomial(done: float, low: float, high: float, settings: Binomial) -> float | Draw:
    """A number of chunks, each kept with a chance that falls from 0.95 to 0.05 along a cosine; then none."""
    if done >= 1:
        return low
    chance, chunks = _half_cosine(done, 0.05, 0.95), settings.chunks
    return lambda rng: low + (high - low) * sum(rng.random() < chance for _ in range(chunks)) / chunks


@dataclass(frozen=True)
class Windows:
    """Settings of schedules in windows."""

    windows: int = knob(10, "equal stretches of the training, each with its interval", ge=1)

    def at(self, done: float) -> int:
        """The number of the window, from 0."""
        return min(int(done * self.windows), self.windows - 1)


@prefix_schedule("linear_max", settings=Windows)
def _linear_max(done: float, low: float, high: float, settings: Windows) -> Interval:
    return low, high - (high - low) * settings.at(done) / settings.windows


@prefix_schedule("reverse_linear", settings=Windows)
def _reverse_linear(done: float, low: float, high: float, settings: Windows) -> Interval:
    return low, low + (high - low) * (settings.at(done) + 1) / settings.windows


def _half_cosine(done: float, low: float, high: float) -> float:
    """From high to low."""
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * done))


def evenly_spaced(low: float, high: float, count: int) -> list[float]:
    """``count`` ratios from low to high; a single one is the high end."""
    return [low + (high - low) * i / (count - 1) for i in range(count - 1)] + [high]  # exactly: 1 is the whole trace
