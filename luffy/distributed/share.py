"""Which process does which problems."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from luffy.types import Task


def share_out(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices for each rank with close sums of costs: the most expensive first, each to the rank with the least. It
    depends on its arguments only, so every rank finds the same answer."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # cost, number, rank
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + costs[i], count + 1, rank))
    return [sorted(share) for share in shares]


def expected_tokens(task: Task, n: int, max_tokens: int) -> float:
    """Estimated tokens of a group of ``n`` responses; a trace's length stands for a response's. It must not depend on
    the run so far, or a resumed run would divide its work differently."""
    lengths = [len(d.token_ids) for d in task.demonstrations]
    response = sum(lengths) / len(lengths) if lengths else max_tokens / 2
    return len(task.prompt_ids) + n * response
