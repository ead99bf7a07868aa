"""Rewards by the name that ``reward.kind`` and ``reward.weights`` give. A built-in one is a file of this package:

@text_reward("exact")
def score(answer, response):
    return float(response.strip() == answer), "ok"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, NamedTuple

from luffy.errors import UserError
from luffy.registry import Registry

if TYPE_CHECKING:
    from luffy.types import Problem

TextReward = Callable[[str, str], tuple[float, str]]
RewardFunction = Callable[..., Any]  # in one of the forms of own_function.py

TEXT_REWARDS: Registry[TextReward] = Registry("reward")
OWN_REWARDS: Registry[RewardFunction] = Registry("reward")
READS_THOUGHTS: set[str] = set()  # of the text rewards


class Answered(NamedTuple):
    """A response to be scored. ``token_ids`` are known where luffy generated it; ``in_thought``: its prompt opened a
    thought with ``<think>``."""

    problem: Problem
    response: str
    token_ids: Sequence[int] | None = None
    in_thought: bool = False


def text_reward(name: str, reads_thoughts: bool = False) -> Callable[[TextReward], TextReward]:
    """A decorator for ``score(answer, response) -> (score, status)``: a pure function that always ends soon, because
    it runs in the trainer's process. A ValueError says that the answer does not suit the reward. It gets what stands
    after the last thought, or with ``reads_thoughts`` the whole response."""
    if reads_thoughts:
        READS_THOUGHTS.add(name)
    return TEXT_REWARDS.register(name)


def reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """A decorator for a reward of your own: ``function(response, answer, problem) -> number``, or for a whole batch
    ``function(prompts, completions, **columns) -> list of numbers``; either may be ``async``.

    It runs in verifier processes, where it may hang or crash without harm (``reward.timeout_s``); one that is defined
    in the script or notebook itself, which those processes cannot import, runs in the trainer's own.
    """
    if name in (*built_in(), "http"):
        raise UserError(f"there is a reward {name!r} already; register yours under another name")
    return OWN_REWARDS.register(name)


@cache
def built_in() -> tuple[str, ...]:
    """Names of the rewards of this package, in alphabetical order; imports all of its files."""
    package = import_module(__package__ or "")
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    return tuple(sorted(["math", *TEXT_REWARDS]))
