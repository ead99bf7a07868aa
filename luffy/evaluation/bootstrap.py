"""Paired bootstrap over items (paper appendix C.3): is a difference more than the choice of test problems?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luffy.seeds import seed_of

Array = NDArray[np.float64]
ITEMS_TO_TELL = 6  # the fewest with 2 / 2^items < 0.05
_CELLS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Difference:
    """``low`` and ``high`` bound the central 95 % of the resampled differences; ``p`` is two-sided."""

    value: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        return self.p < 0.05


def resampled_means(values: Array, resamples: int, rng: np.random.Generator) -> Array:
    """Means of ``resamples`` draws of as many items as there are, with replacement."""
    n = len(values)
    rows = max(1, _CELLS_AT_ONCE // n)
    blocks = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    return np.concatenate([values[rng.integers(0, n, size=(count, n))].mean(axis=1) for count in blocks])


def paired_difference(pairs: Sequence[tuple[str, Array, Array]], resamples: int = 1000, seed: int = 0) -> Difference:
    """Second minus first, averaged over benchmarks with equal weight; ``pairs`` holds (name, first, second).

    Items are resampled within each benchmark, the same ones for both models. The draws depend on the seed
    and the benchmark alone, so every pair of models is judged on the same resampled test sets. Under the
    null hypothesis the resampled differences are centred on zero: p is the share of them, centred, at
    least as far out as the observed one, the observed one counted in (so p is never 0). Resamples of a handful of
    items are all alike, so p is never below what a sign test of the smallest benchmark can reach at best, 2 / 2^items:
    fewer than ``ITEMS_TO_TELL`` items tell no difference.
    """
    observed = float(np.mean([(second - first).mean() for _, first, second in pairs]))
    draws = np.mean([_draws(name, second - first, resamples, seed) for name, first, second in pairs], axis=0)
    low, high = np.quantile(draws, [0.025, 0.975])
    # equal items give equal sums up to rounding: a hair's breadth counts as reached
    as_far = np.abs(draws - observed) >= abs(observed) - 1e-12
    fewest = min(len(first) for _, first, _ in pairs)
    p = max((1 + int(as_far.sum())) / (1 + resamples), 2.0 ** (1 - fewest))
    return Difference(observed, float(low), float(high), p)


def _draws(name: str, differences: Array, resamples: int, seed: int) -> Array:
    rng = np.random.default_rng(seed_of(f"bootstrap:{seed}:{name}"))
    return resampled_means(differences, resamples, rng)
