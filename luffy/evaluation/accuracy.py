"""avg@k, pass@k and their company, from the scores of single responses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SUCCESS = 1.0

Row = Mapping[str, Any]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of the n samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    Unbiased for pass@k of the model, unlike ``1 - (1 - c/n)**k``.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} of {correct} right among {n} samples is undefined")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def reported_k(k: int) -> list[int]:
    """1, 2, 4, 8 ... and k itself."""
    return sorted({2**power for power in range(k.bit_length())} | {k})


def is_right(row: Row) -> bool:
    """Lines of older evaluations have the score alone."""
    return bool(row.get("right", row["score"] >= SUCCESS))


def by_item(rows: Iterable[Row]) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row["id"], []).append(row)
    return grouped


def item_accuracy(rows: Iterable[Row]) -> dict[str, float]:
    """Share of right samples per item: what the paired bootstrap resamples."""
    return {key: float(np.mean([is_right(row) for row in group])) for key, group in by_item(rows).items()}


def mean_pass_at_k(rows: Iterable[Row], k: int) -> float:
    groups = by_item(rows).values()
    return float(np.mean([pass_at_k(len(group), sum(map(is_right, group)), k) for group in groups]))


@dataclass(frozen=True)
class Summary:
    """One benchmark's figures. ``accuracy`` is avg@k: the mean over items of the share of right samples."""

    items: int
    k: int
    accuracy: float
    standard_error: float | None  # one item says nothing of it
    pass_at: dict[int, float]
    mean_score: float
    mean_tokens: float
    mean_tokens_right: float | None
    mean_tokens_wrong: float | None
    truncated: float
    statuses: dict[str, int]


def summarise(rows: Sequence[Row], k: int) -> Summary:
    accuracies = np.array(list(item_accuracy(rows).values()))
    right = [row["tokens"] for row in rows if is_right(row)]
    wrong = [row["tokens"] for row in rows if not is_right(row)]
    return Summary(
        items=len(accuracies),
        k=k,
        accuracy=float(accuracies.mean()),
        standard_error=float(accuracies.std(ddof=1) / math.sqrt(len(accuracies))) if len(accuracies) > 1 else None,
        pass_at={size: mean_pass_at_k(rows, size) for size in reported_k(k)},
        mean_score=float(np.mean([row["score"] for row in rows])),
        mean_tokens=float(np.mean([row["tokens"] for row in rows])),
        mean_tokens_right=float(np.mean(right)) if right else None,
        mean_tokens_wrong=float(np.mean(wrong)) if wrong else None,
        truncated=float(np.mean([row["finish"] == "length" for row in rows])),
        statuses=dict(Counter(row["status"] for row in rows)),
    )
