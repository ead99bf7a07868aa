"""Which of a problem's traces guide this visit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luffy.registry import NoSettings, Part, Registry
from luffy.types import Demonstration


@dataclass(frozen=True)
class TraceOrder(Part):
    """What ``trace_choice`` registers. ``needs_rewards``: it reads the verifier's rewards of the traces."""

    needs_rewards: bool = False


@dataclass(frozen=True)
class Visit:
    """What an order may depend on: a name for this problem in this step (``key``, a seed), how many traces earlier
    visits of the problem took (``start``), and the rewards of the traces if they were asked for."""

    key: str
    start: int
    rewards: Sequence[float] = ()


ORDERS: Registry[TraceOrder] = Registry("trace choice", TraceOrder)


def trace_choice(
    name: str, settings: type = NoSettings, needs_rewards: bool = False
) -> Callable[[Callable[..., Sequence[int]]], Callable[..., Sequence[int]]]:
    """A decorator that registers an order of traces for ``guidance.trace_choice``.

    ``function(traces, visit)`` returns the numbers of the traces in the order in which they are taken. With a dataclass
    of ``settings`` it takes them as a third argument. ``needs_rewards``: ``visit.rewards`` has the verifier's.
    """
    return ORDERS.register(name, settings=settings, needs_rewards=needs_rewards)


def choose(
    demonstrations: Sequence[Demonstration],
    count: int,
    how: str,
    *,
    visit: int,
    key: str,
    rewards: Sequence[float] | None = None,
) -> list[Demonstration]:
    """``count`` of the traces, repeating only when there are fewer. ``visit`` counts how often the problem was seen
    before; ``rewards`` (one per trace) is for orders that need them, such as ``best_reward``."""
    order = ORDERS[how]
    assert rewards is not None or not order.needs_rewards, f"{how} needs the verifier's rewards of the traces"
    rows = order(demonstrations, Visit(key, visit * count, rewards or ()), *order.settings_for(how))
    return [demonstrations[rows[i % len(rows)]] for i in range(count)]


@trace_choice("random")
def _random(traces: Sequence[Demonstration], visit: Visit) -> list[int]:
    rows = list(range(len(traces)))
    random.Random(f"trace:{visit.key}").shuffle(rows)
    return rows


@trace_choice("round_robin")
def _round_robin(traces: Sequence[Demonstration], visit: Visit) -> list[int]:
    return [(visit.start + i) % len(traces) for i in range(len(traces))]


@trace_choice("shortest")
def _shortest(traces: Sequence[Demonstration], visit: Visit) -> list[int]:
    return sorted(range(len(traces)), key=lambda i: len(traces[i].token_ids))


@trace_choice("best_reward", needs_rewards=True)
def _best_reward(traces: Sequence[Demonstration], visit: Visit) -> list[int]:
    return sorted(range(len(traces)), key=lambda i: (-visit.rewards[i], len(traces[i].token_ids)))
