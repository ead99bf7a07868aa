"""From (problem, response) pairs to scores: one reward or a weighted sum of several.

A verification that hangs, crashes or raises scores 0, keeps its reason as the status, is counted, and
is warned about the first time, because a reward that is silently 0 ruins a training run.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from luffy.errors import UserError
from luffy.rewards import math as math_reward
from luffy.rewards.custom import finite_number, require_three_arguments
from luffy.rewards.extract import after_thought, tail
from luffy.rewards.kinds import OWN_REWARDS, READS_THOUGHTS, TEXT_REWARDS, OwnReward, built_in
from luffy.rewards.pool import Outcome, WorkerPool
from luffy.rewards.worker import describe
from luffy.schema import nearest
from luffy.types import Problem, Score

logger = logging.getLogger(__name__)

Item = tuple[Problem, str]
Scorer = Callable[[Problem, str], tuple[float, str]]


class Reward(Protocol):
    """One term of a verifier."""

    def outcomes(self, items: Sequence[Item]) -> list[Outcome]:
        """One per item; the value of an "ok" outcome is (score, status)."""

    def self_check(self) -> None:
        """Raise a UserError when the reward cannot do its work."""

    def close(self) -> None: ...


class InProcessReward:
    """``scorer(problem, response)`` in this process; an error of the ``caught`` kinds scores 0."""

    def __init__(self, scorer: Scorer, caught: type[Exception] = ValueError) -> None:
        self._scorer, self._caught = scorer, caught

    def outcomes(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._outcome(problem, response) for problem, response in items]

    def _outcome(self, problem: Problem, response: str) -> Outcome:
        try:
            return Outcome("ok", self._scorer(problem, response))
        except self._caught as error:
            return Outcome("error", message=describe(error))

    def self_check(self) -> None:
        """Nothing outside this package can break it."""

    def close(self) -> None:
        """Holds nothing."""


class AfterThought:
    """A reward that sees of each response what stands after its last thought."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self.self_check, self.close = reward.self_check, reward.close

    def outcomes(self, items: Sequence[Item]) -> list[Outcome]:
        return self._reward.outcomes([(problem, after_thought(response)) for problem, response in items])


class MathReward:
    def __init__(self, workers: int, timeout_s: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(f"the math reward needs Math-Verify; {math_reward.INSTALL_HINT}")
        self._pool = WorkerPool(f"{math_reward.__name__}:load", workers, timeout_s, factory_args=())

    def outcomes(self, items: Sequence[Item]) -> list[Outcome]:
        return self._pool.map((problem.answer, tail(response)) for problem, response in items)

    def self_check(self) -> None:
        """Math-Verify changes its verdicts silently under a wrong antlr runtime: ask it what we know."""
        outcomes = self._pool.map((gold, response) for gold, response, _ in math_reward.SELF_CHECKS)
        for (gold, response, expected), outcome in zip(math_reward.SELF_CHECKS, outcomes, strict=True):
            if outcome.status != "ok" or outcome.value != (expected, "ok"):
                found = outcome.value if outcome.status == "ok" else f"{outcome.status} ({outcome.message})"
                raise UserError(
                    f"math self-check failed: gold {gold} against {response} gave {found}, expected {expected:g}; "
                    f"another antlr runtime than Math-Verify's is the usual cause: {math_reward.INSTALL_HINT}"
                )

    def close(self) -> None:
        self._pool.close()


class CustomReward:
    """``fn(response, answer, problem) -> float`` of the user's, safe to hang or crash."""

    def __init__(self, path: str, workers: int, timeout_s: float) -> None:
        self._pool = WorkerPool(
            "luffy.rewards.custom:load", workers, timeout_s, preload=("luffy.types",), factory_args=(path,)
        )

    def outcomes(self, items: Sequence[Item]) -> list[Outcome]:
        return self._pool.map((response, problem.answer, problem) for problem, response in items)

    def self_check(self) -> None:
        """Waits until a worker has imported the function, so that a wrong path fails here."""
        self._pool.wait_ready()

    def close(self) -> None:
        self._pool.close()


class Verifier:
    """Scores responses; ``counts`` tallies the statuses of everything scored so far."""

    def __init__(self, rewards: dict[str, Reward], weights: Mapping[str, float]) -> None:
        self._rewards = rewards
        self._weights = dict(weights)
        self._lock = threading.Lock()
        self._warned: set[tuple[str, str]] = set()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, items: Sequence[Item]) -> list[Score]:
        """One score per item, in order: the weighted sum, with the first status that is not "ok"."""
        terms = [self._term(name, items) for name in self._rewards]
        scores = [self._combine(parts) for parts in zip(*terms, strict=True)]
        with self._lock:
            self.counts.update(score.status for score in scores)
        return scores

    def self_check(self) -> None:
        for reward in self._rewards.values():
            reward.self_check()

    def close(self) -> None:
        for reward in self._rewards.values():
            reward.close()

    def _term(self, name: str, items: Sequence[Item]) -> list[Score]:
        outcomes = self._rewards[name].outcomes(items)
        for (problem, _), outcome in zip(items, outcomes, strict=True):
            if outcome.status != "ok":
                self._warn_once(name, problem, outcome)
        return [Score(*outcome.value) if outcome.status == "ok" else Score(0.0, outcome.status) for outcome in outcomes]

    def _combine(self, parts: tuple[Score, ...]) -> Score:
        value = math.fsum(weight * part.value for weight, part in zip(self._weights.values(), parts, strict=True))
        return Score(value, next((part.status for part in parts if part.status != "ok"), "ok"))

    def _warn_once(self, name: str, problem: Problem, outcome: Outcome) -> None:
        with self._lock:
            if (name, outcome.status) in self._warned:
                return
            self._warned.add((name, outcome.status))
        logger.warning(
            "reward %s: %s on problem %s (%s); it scores 0. Further ones are only counted.",
            name,
            outcome.status,
            problem.id,
            outcome.message,
        )


def build_verifier(
    kind: str = "math",
    weights: Mapping[str, float] | None = None,
    workers: int = 2,
    timeout_s: float = 8.0,
    answer_in_thought: bool = False,
) -> Verifier:
    """A verifier that has passed its self-check. ``weights`` such as ``{"math": 1.0, "format": 0.1}``
    make a weighted sum of those kinds and replace ``kind``. With ``answer_in_thought`` an answer inside
    ``<think>...</think>`` counts too."""
    chosen = {kind: 1.0} if weights is None else dict(weights)
    _check_weights(chosen)
    rewards: dict[str, Reward] = {}
    verifier = Verifier(rewards, chosen)
    try:
        for name in chosen:
            reward = _build_reward(name, workers, timeout_s)
            reads_answers = name == "math" or (name in TEXT_REWARDS and name not in READS_THOUGHTS)
            rewards[name] = AfterThought(reward) if reads_answers and not answer_in_thought else reward
        verifier.self_check()
    except BaseException:
        verifier.close()
        raise
    return verifier


def _check_weights(weights: Mapping[str, float]) -> None:
    if not weights:
        raise UserError("reward weights are empty; name at least one reward, such as {'math': 1.0}")
    for name, weight in weights.items():
        _check_kind(name)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UserError(f"the weight of reward {name!r} must be a finite number, found {weight!r}")


def _check_kind(kind: str) -> None:
    known = (*built_in(), *OWN_REWARDS)
    if kind in known or (":" in kind and kind != "module:function"):
        return
    raise UserError(
        f"unknown reward {kind!r}{nearest(kind, known)}; known: {', '.join(known)}, or module:function of your own"
    )


def _build_reward(kind: str, workers: int, timeout_s: float) -> Reward:
    if kind == "math":
        return MathReward(workers, timeout_s)
    if kind in TEXT_REWARDS:
        score = TEXT_REWARDS[kind]
        return InProcessReward(lambda problem, response: score(problem.answer, response))
    if kind not in OWN_REWARDS:
        return CustomReward(kind, workers, timeout_s)
    own = OWN_REWARDS[kind]
    if getattr(sys.modules.get(own.__module__), own.__qualname__, None) is own and own.__module__ != "__main__":
        return CustomReward(f"{own.__module__}:{own.__qualname__}", workers, timeout_s)
    return InProcessReward(_of_this_process(kind, own), caught=Exception)


def _of_this_process(kind: str, own: OwnReward) -> Scorer:
    require_three_arguments(kind, own)
    return lambda problem, response: (finite_number(kind, own(response, problem.answer, problem)), "ok")
