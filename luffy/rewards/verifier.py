"""Score (problem, response) pairs by one reward or a weighted sum of several.

A verification that hangs, crashes or raises scores 0 and keeps its reason as the status; the first of each kind is
warned about, because a reward that is silently 0 ruins a run. A sample without a score (None) scores 0 too.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from luffy.errors import UserError
from luffy.rewards import math as math_reward
from luffy.rewards import reasoning_gym
from luffy.rewards.extract import after_thought, tail
from luffy.rewards.http_reward import HttpReward, is_address
from luffy.rewards.kinds import REWARDS, Answered, HttpRewardConfig, Reward, TextReward
from luffy.rewards.own_function import CALL_FAILED, NOT_SCORED, Form, OwnFunction, with_settings
from luffy.rewards.pool import START_TIMEOUT_S, Outcome, WorkerPool
from luffy.rewards.reasoning_gym import ReasoningGymSettings
from luffy.rewards.worker import describe
from luffy.schema import Chosen, nearest, to_dict
from luffy.types import Finish, Problem, Score

logger = logging.getLogger(__name__)

Ids = Sequence[int] | None
# problem, response, its token ids, whether its prompt opened a thought
Item = tuple[Problem, str] | tuple[Problem, str, Ids] | tuple[Problem, str, Ids, bool]

GO_ON = "fix it and rerun the same command to resume here"
ASYNC_GRACE_S = 2.0  # a worker's async samples end themselves; one that blocks its loop is killed this much later


class InProcessReward(Reward):
    """``scorer(answer, response)`` in this process; an answer that does not suit it (ValueError) scores 0."""

    one_by_one = True

    def __init__(self, scorer: TextReward) -> None:
        self._scorer = scorer

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
        return [self._outcome(item.problem.answer, item.response) for item in items]

    def _outcome(self, answer: str, response: str) -> Outcome:
        try:
            return Outcome("ok", self._scorer(answer, response))
        except ValueError as error:
            return Outcome("error", message=describe(error))


class AfterThought(Reward):
    """A reward that sees only the text after the last thought. ``prompt_opens_thought``: also after one that the prompt
    opened."""

    def __init__(self, reward: Reward, prompt_opens_thought: bool) -> None:
        self._reward, self._prompt_opens_thought = reward, prompt_opens_thought
        self.self_check, self.close, self.one_by_one = reward.self_check, reward.close, reward.one_by_one  # type: ignore[method-assign]

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
        return self._reward.outcomes([item._replace(response=self._answer(item)) for item in items])

    def _answer(self, item: Answered) -> str:
        return after_thought(item.response, self._prompt_opens_thought and item.in_thought)


class PoolReward(Reward):
    """A reward in worker processes."""

    _pool: WorkerPool

    def close(self) -> None:
        self._pool.close()


class MathReward(PoolReward):
    """Answers compared by Math-Verify."""

    one_by_one = True

    def __init__(self, workers: int, timeout_s: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(f"the math reward needs Math-Verify; {math_reward.INSTALL_HINT}")
        self._pool = WorkerPool(f"{math_reward.__name__}:load", workers, timeout_s, factory_args=())

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
        return self._pool.map([(item.problem.answer, tail(item.response)) for item in items])

    def self_check(self) -> None:
        """Compare known verdicts: a wrong antlr runtime changes Math-Verify's verdicts silently."""
        outcomes = self._pool.map((gold, response) for gold, response, _ in math_reward.SELF_CHECKS)
        for (gold, response, expected), outcome in zip(math_reward.SELF_CHECKS, outcomes, strict=True):
            if outcome.status != "ok" or outcome.value != (expected, "ok"):
                found = outcome.value if outcome.status == "ok" else f"{outcome.status} ({outcome.message})"
                raise UserError(
                    f"math self-check failed: gold {gold} against {response} gave {found}, expected {expected:g}; "
                    f"another antlr runtime than Math-Verify's is the usual cause: {math_reward.INSTALL_HINT}"
                )


class ReasoningGymReward(PoolReward):
    """Answers judged by the family that made the problem."""

    one_by_one = True

    def __init__(self, workers: int, timeout_s: float, settings: ReasoningGymSettings) -> None:
        self._pool = WorkerPool(f"{reasoning_gym.__name__}:load", workers, timeout_s, factory_args=(settings.read,))

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
        return self._pool.map([(item.problem.meta.get("entry"), item.response) for item in items])

    def self_check(self) -> None:
        """Wait until the workers have imported the package, so that a missing one fails here."""
        self._pool.wait_ready()


class OwnReward(PoolReward):
    """A custom function in worker processes, where it may hang or crash."""

    def __init__(
        self, path: str, workers: int, timeout_s: float, concurrency: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._timeout_s, self._concurrency = timeout_s, concurrency
        self._form = Form(batch=False, is_async=False)
        factory, arguments = "luffy.rewards.own_function:load", (path, timeout_s, dict(settings or {}))
        self._pool = WorkerPool(factory, workers, timeout_s, factory_args=arguments)

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
        if not self._form.batch:  # functions of one sample do not take its ids, and thousands of lists are sent slowly
            items = [Answered(item.problem, item.response) for item in items]
        calls = self._form.calls(items, self._concurrency)
        limit = self._timeout_s + (ASYNC_GRACE_S if self._form.is_async and not self._form.batch else 0)
        returned = self._pool.map([(call,) for call in calls], timeout_s=limit)
        return [o for call, of_call in zip(calls, returned, strict=True) for o in each(self._form, call, of_call)]

    def self_check(self) -> None:
        """Wait until the workers have imported the function, so that a wrong path fails here."""
        self._pool.wait_ready()
        [form] = self._pool.map([(None,)], timeout_s=START_TIMEOUT_S)
        if form.status != "ok":
            raise RuntimeError(f"a worker did not say how to call its function: {form.message}")
        self._form = form.value
        self.one_by_one = not self._form.batch and not self._form.is_async


class OwnInThisProcess(Reward):
    """A custom function that worker processes cannot import, because a script or notebook defines it."""

    def __init__(self, name: str, function: Callable[..., Any], timeout_s: float, concurrency: int) -> None:
        self._own, self._concurrency = OwnFunction(name, function, timeout_s), concurrency
        self.close = self._own.close  # type: ignore[method-assign]

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
        return [o for call in self._own.form.calls(items, self._concurrency) for o in self._of_call(call)]

    def _of_call(self, call: Sequence[Answered]) -> list[Outcome]:
        try:
            return self._own.outcomes(call)
        except Exception as error:
            return each(self._own.form, call, Outcome("error", message=describe(error)))


def each(form: Form, call: Sequence[Answered], of_call: Outcome) -> list[Outcome]:
    """Outcomes of a call's samples. If a call with a batch failed, no sample can be blamed."""
    if of_call.status == "ok":
        return [Outcome(*of_sample) for of_sample in of_call.value]
    if form.batch:
        of_call = Outcome(CALL_FAILED, message=f"{of_call.status}: {of_call.message}")
    return [of_call] * len(call)


class Verifier(AbstractContextManager["Verifier"]):
    """Scores responses; ``counts`` tallies the statuses of everything scored so far."""

    def __init__(
        self, rewards: dict[str, Reward], weights: Mapping[str, float], most_if_cut_off: float | None = None
    ) -> None:
        self._rewards, self._most_if_cut_off = rewards, most_if_cut_off
        self._weights = dict(weights)
        self._lock = threading.Lock()
        self._warned: set[tuple[str, str]] = set()
        self.counts: Counter[str] = Counter()

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, items: Sequence[Item]) -> list[Score]:
        """One score per (problem, response), in order: the weighted sum, with the status of a term that failed, else
        the first that is not "ok". An item may also have its token ids and whether its prompt opened a thought.

            >>> verifier = build_verifier("numeric")
            >>> problem = Problem(id="p", prompt="2 + 3?", answer="5")
            >>> [score.value for score in verifier.score([(problem, "It is 5."), (problem, "It is 6.")])]
            [1.0, 0.0]
        """
        answered = [Answered(*item) for item in items]
        terms = [self._term(name, answered) for name in self._rewards]
        scores = [self._combine(parts) for parts in zip(*terms, strict=True)]
        with self._lock:
            self.counts.update(score.status for score in scores)
        return scores

    def at_its_end(self, score: Score, finish: Finish | None) -> Score:
        """The score of a response that ended so: at most ``most_if_cut_off`` if a limit ended it."""
        if finish != "length" or self._most_if_cut_off is None:
            return score
        return replace(score, value=min(score.value, self._most_if_cut_off))

    @property
    def may_score_early(self) -> bool:
        """Whether responses may be scored while others are generated: no term needs them all at once, and none keeps
        this process busy for long."""
        return all(reward.one_by_one for reward in self._rewards.values())

    def self_check(self) -> None:
        """Raise a UserError if a reward cannot work."""
        for reward in self._rewards.values():
            reward.self_check()

    def close(self) -> None:
        """End the processes of all rewards."""
        for reward in self._rewards.values():
            reward.close()

    def _term(self, name: str, items: Sequence[Answered]) -> list[Score]:
        outcomes = zip(items, self._rewards[name].outcomes(items), strict=True)
        return [
            Score(*outcome.value) if outcome.status == "ok" else self._failure(name, item.problem, outcome)
            for item, outcome in outcomes
        ]

    def _combine(self, parts: tuple[Score, ...]) -> Score:
        if len(parts) == 1:  # mostly, and a step has thousands
            [weight], [part] = self._weights.values(), parts
            return part if weight == 1 else replace(part, value=weight * part.value)
        value = math.fsum(weight * part.value for weight, part in zip(self._weights.values(), parts, strict=True))
        # A term without a score for a sample leaves it to the others.
        told = [part for part in parts if part.status != NOT_SCORED.status] or parts
        failed = (part for part in told if not part.is_verdict)
        shown = next(failed, next((part for part in told if part.status != "ok"), told[0]))
        scored = (pair for pair in zip(self._weights, parts, strict=True) if pair[1].status != NOT_SCORED.status)
        return replace(shown, value=value, components={name: part.value for name, part in scored})

    def _failure(self, name: str, problem: Problem, outcome: Outcome) -> Score:
        """Score of a failed verification; the first of its kind is warned about."""
        reason = f"reward {name}: {outcome.status} on problem {problem.id} ({outcome.message})"
        with self._lock:
            if (name, outcome.status) not in self._warned and not (outcome == NOT_SCORED and len(self._rewards) > 1):
                self._warned.add((name, outcome.status))
                logger.warning("%s; it scores 0. Further ones are only counted.", reason)
        return Score(0.0, outcome.status, reason)


def why_nothing_was_scored(scores: Sequence[Score]) -> str | None:
    """The first failure if no score is a verdict, else None."""
    if not scores or any(score.is_verdict for score in scores):
        return None
    return scores[0].reason or scores[0].status


def why_every_call_failed(scores: Sequence[Score]) -> str | None:
    """The first failure if every score belongs to a failed call, else None."""
    return why_nothing_was_scored(scores) if all(score.status == CALL_FAILED for score in scores) else None


def build_verifier(
    kind: str = "math",
    weights: Mapping[str, float] | None = None,
    workers: int = 2,
    timeout_s: float = 8.0,
    answer_in_thought: bool = False,
    concurrency: int = 16,
    http: HttpRewardConfig | None = None,
    prompt_opens_thought: bool = True,
    most_if_cut_off: float | None = None,
) -> Verifier:
    """Build a verifier and run its self-check.

    ``weights``, such as ``{"math": 1.0, "format": 0.1}``, replace ``kind``. The others are settings of section
    ``reward``; ``most_if_cut_off`` is ``reward.failure`` with ``reward.cut_off=failure``.
    """
    chosen = {kind: 1.0} if weights is None else dict(weights)
    _check_weights(chosen)
    rewards: dict[str, Reward] = {}
    verifier = Verifier(rewards, chosen, most_if_cut_off)
    try:
        for name in chosen:
            reward = _build_reward(name, workers, timeout_s, concurrency, http or HttpRewardConfig())
            hides_thoughts = not REWARDS.known(name).reads_thoughts and not answer_in_thought
            rewards[name] = AfterThought(reward, prompt_opens_thought) if hides_thoughts else reward
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
    known = list(REWARDS)
    if kind in known or (":" in kind and kind != "module:function"):
        return
    raise UserError(
        f"unknown reward {kind!r}{nearest(kind, known)}; known: {', '.join(known)}, an address, or "
        f"module:function of your own"
    )


def _build_reward(kind: str, workers: int, timeout_s: float, concurrency: int, http: HttpRewardConfig) -> Reward:
    if kind == "http" or is_address(kind):
        return HttpReward(http.url if kind == "http" else kind, http)
    if kind not in REWARDS:
        return OwnReward(str(kind), workers, timeout_s, concurrency)
    part = REWARDS[kind]
    own = part.function
    if kind in ("math", "reasoning_gym"):
        return own(workers, timeout_s, *part.settings_for(kind))  # type: ignore[no-any-return]
    if not part.own:
        return InProcessReward(own)
    module, name = own.__module__, getattr(own, "__qualname__", "")  # an object that is called has no name
    settings = to_dict(kind.settings) if isinstance(kind, Chosen) else {}
    if getattr(sys.modules.get(module), name, None) is own and module != "__main__":
        return OwnReward(f"{module}:{name}", workers, timeout_s, concurrency, settings)
    return OwnInThisProcess(str(kind), with_settings(own, settings), timeout_s, concurrency)
