"""How much of a trace a sample starts from: pure functions of step, problem and seed.

The same seed and step give the same ratios on any number of ranks and after a resume, because the
random ones are drawn from a generator made of (seed, step, problem) and nothing else.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["random", "fixed", "linear", "linear_max", "reverse_linear", "cosine"]
WINDOWS = 10


@dataclass(frozen=True)
class RatioSchedule:
    """``RatioSchedule("fixed", 1.0, 1.0)`` is the paper's: every prefix sample is a whole trace."""

    strategy: Strategy = "fixed"
    min_ratio: float = 1.0
    max_ratio: float = 1.0
    prefix_steps: int = 1
    shared: bool = False

    def ratios(self, count: int, step: int, key: str) -> list[float]:
        """One ratio for each of ``count`` prefix samples of a problem; ``key`` names problem and seed."""
        if self.strategy == "fixed":
            return evenly_spaced(self.min_ratio, self.max_ratio, count)
        rng = random.Random(f"prefix:{key}:{step}")
        low, high = self._range(step)
        if self.shared:
            return [rng.uniform(low, high)] * count
        return [rng.uniform(low, high) for _ in range(count)]

    def _range(self, step: int) -> tuple[float, float]:
        """The interval a ratio is drawn from at this step; a point for the deterministic strategies."""
        done = min(step / self.prefix_steps, 1.0)
        span = self.max_ratio - self.min_ratio
        window = min(int(done * WINDOWS), WINDOWS - 1)
        if self.strategy == "random":
            return self.min_ratio, self.max_ratio
        if self.strategy == "linear":
            ratio = self.max_ratio * (1 - done)
            return ratio, ratio
        if self.strategy == "cosine":
            ratio = self.min_ratio + span * 0.5 * (1 + math.cos(math.pi * done))
            return ratio, ratio
        if self.strategy == "linear_max":
            return self.min_ratio, self.max_ratio - span * window / WINDOWS
        return self.min_ratio, self.min_ratio + span * (window + 1) / WINDOWS


def evenly_spaced(low: float, high: float, count: int) -> list[float]:
    """``count`` ratios from low to high; a single one is the high end."""
    if count == 1:
        return [high]
    return [low + (high - low) * i / (count - 1) for i in range(count)]
