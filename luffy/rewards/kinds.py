"""Rewards by the name that ``reward.kind`` and ``reward.weights`` give. A built-in one is a file of this package:

@text_reward("exact")
def score(answer, response):
    return float(response.strip() == answer), "ok"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from luffy.registry import NoSettings, Part, Registry, in_module
from luffy.schema import knob

if TYPE_CHECKING:
    from luffy.rewards.pool import Outcome
    from luffy.types import Problem

TextReward = Callable[[str, str], tuple[float, str]]
RewardFunction = Callable[..., Any]  # in one of the forms of own_function.py


@dataclass(frozen=True)
class RewardPart(Part):
    """A reward and what is known about it. ``own``: a function of the user's, in one of the forms of own_function.py;
    ``binary``: its score is 0 or 1; ``judges_answer``: a wrong answer scores 0; ``reads_thoughts``: it sees the whole
    response and not only what stands after the last thought."""

    own: bool = True
    binary: bool = False
    judges_answer: bool = True
    reads_thoughts: bool = True


REWARDS: Registry[RewardPart] = Registry("reward", RewardPart, home="luffy.rewards", open_to_all=True)
REWARDS.register("math", own=False, binary=True, reads_thoughts=False)(in_module("luffy.rewards.verifier:MathReward"))
REWARDS.register("http", own=False)(in_module("luffy.rewards.http_reward:HttpReward"))


class Answered(NamedTuple):
    """A response to be scored. ``token_ids`` are known where luffy generated it; ``in_thought``: its prompt opened a
    thought with ``<think>``."""

    problem: Problem
    response: str
    token_ids: Sequence[int] | None = None
    in_thought: bool = False


class Reward:
    """One term of a verifier. ``one_by_one``: each response may be scored by itself, in a thread next to generation."""

    one_by_one: bool = False

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
        """One per item; the value of an "ok" outcome is (score, status)."""
        raise NotImplementedError

    def self_check(self) -> None:
        """Raise a UserError if the reward cannot work."""

    def close(self) -> None:
        """Release processes and threads."""


def text_reward(
    name: str, reads_thoughts: bool = False, judges_answer: bool = True
) -> Callable[[TextReward], TextReward]:
    """A decorator for ``score(answer, response) -> (score, status)``, with a score of 0 or 1: a pure function that
    always ends soon, because it runs in the trainer's process. A ValueError says that the answer does not suit the
    reward. It gets what stands after the last thought, or with ``reads_thoughts`` the whole response."""
    facts = {"reads_thoughts": reads_thoughts, "judges_answer": judges_answer}
    return REWARDS.register(name, own=False, binary=True, **facts)


def reward(name: str, settings: type = NoSettings, **facts: bool) -> Callable[[RewardFunction], RewardFunction]:
    """Register a reward: ``function(response, answer, problem) -> number``, or for a whole batch ``function(prompts,
    completions, **columns) -> list of numbers``; either may be ``async`` and take ``settings``.

    It runs in verifier processes, or, if a script or notebook defines it, in the trainer's.

    Facts: ``binary`` (rewards are 0 or 1, default False), ``judges_answer`` (an incorrect answer gets 0, default
    True).
    """
    return REWARDS.register(name, settings=settings, **facts)


def built_in() -> tuple[str, ...]:
    """Names of the rewards of this package that need no server, in alphabetical order."""
    return tuple(sorted(name for name, part in REWARDS.entries.items() if not part.own and name != "http"))


@dataclass(frozen=True)
class HttpRewardConfig:
    """Settings of a reward server (``reward.http``)."""

    url: str | None = knob(None, "the server's address, if reward.kind=http")
    timeout_s: float = knob(60.0, "limit for a complete answer", gt=0)
    retries: int = knob(3, "times to send a request again; then its samples get 0", ge=0)
    wait_s: float = knob(1.0, "first pause before a retry; doubles, up to 60", ge=0)
    concurrency: int = knob(8, "requests at once, per process", ge=1)
    batch_size: int = knob(16, "samples in a request", ge=1)
    header_env: dict[str, str] = knob(
        factory=dict, help="headers from environment variables, e.g. {Authorization: MY_VARIABLE}"
    )
