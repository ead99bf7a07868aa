"""Which of a problem's traces guide this visit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from luffy.types import Demonstration

TraceChoice = Literal["random", "round_robin", "shortest", "best_reward"]


def choose(
    demonstrations: Sequence[Demonstration],
    count: int,
    how: TraceChoice,
    *,
    visit: int,
    key: str,
    rewards: Sequence[float] | None = None,
) -> list[Demonstration]:
    """``count`` of the traces, repeating only when there are fewer. ``visit`` counts how often the
    problem was seen before; ``rewards`` (one per trace) is what ``best_reward`` ranks by."""
    order = _order(demonstrations, how, visit * count, key, rewards)
    return [demonstrations[order[i % len(order)]] for i in range(count)]


def _order(
    demonstrations: Sequence[Demonstration], how: TraceChoice, start: int, key: str, rewards: Sequence[float] | None
) -> list[int]:
    rows = list(range(len(demonstrations)))
    if how == "random":
        random.Random(f"trace:{key}").shuffle(rows)
    elif how == "round_robin":
        rows = [rows[(start + i) % len(rows)] for i in rows]
    elif how == "shortest":
        rows.sort(key=lambda i: len(demonstrations[i].token_ids))
    else:
        assert rewards is not None, "best_reward needs the verifier's scores of the traces"
        rows.sort(key=lambda i: (-rewards[i], len(demonstrations[i].token_ids)))
    return rows
