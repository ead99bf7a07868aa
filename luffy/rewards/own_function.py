"""Custom reward functions: detect the form and call it, in a worker process or in this one.

    function(response, answer, problem) -> number                           one sample
    function(prompts, completions, completion_ids, **columns) -> numbers    a batch, as TRL calls it

The names of its parameters tell the form. Either may be ``async``. None in place of a number: the sample has no score.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from luffy.errors import UserError
from luffy.registry import NoSettings, resolve
from luffy.rewards.kinds import REWARDS, Answered, RewardFunction
from luffy.rewards.pool import Outcome
from luffy.rewards.worker import describe
from luffy.schema import build
from luffy.types import Problem  # of the items: imported before the limits of the first one begin

BATCH_NAMES = ("prompts", "completions", "completion_ids")
SAMPLE_NAMES = ("response", "problem")
NOT_SCORED = Outcome("not_scored", message="the reward gave no score for it")
CLOSE_PATIENCE_S = 5.0
CALL_FAILED = "call_failed"  # the status of all samples of a call that failed as a whole


@dataclass(frozen=True)
class Form:
    """How a function is called. ``batch``: with all samples at once."""

    batch: bool
    is_async: bool

    def calls(self, items: Sequence[Answered], concurrency: int) -> list[Sequence[Answered]]:
        """Samples of each call of ``OwnFunction.outcomes``: all of them for a batch, ``concurrency`` for an async
        function, else one, so that a kill costs one."""
        size = max(len(items), 1) if self.batch else concurrency if self.is_async else 1
        return [items[start : start + size] for start in range(0, len(items), size)]


class OwnFunction:
    """A custom function under one interface. An async sample may take ``timeout_s``; the caller limits the rest."""

    def __init__(self, path: str, function: RewardFunction, timeout_s: float) -> None:
        self.form = form_of(path, function)
        self._path, self._function, self._timeout_s = path, function, timeout_s

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
        """One per sample; the value of an "ok" outcome is (score, status). Exceptions of a function that takes a batch,
        or one sample without ``async``, are raised."""
        if self.form.batch:
            return self._scores_of_batch(items)
        if self.form.is_async:
            return self._wait_for(self._all(items))
        return [outcome_of(self._path, self._function(i.response, i.problem.answer, i.problem)) for i in items]

    def _scores_of_batch(self, items: Sequence[Answered]) -> list[Outcome]:
        returned = self._function(**self._arguments(items))
        values = list(self._wait_for(returned) if self.form.is_async else returned)
        if len(values) != len(items):
            raise ValueError(f"{self._path} returned {len(values)} scores for {len(items)} completions")
        return [outcome_of(self._path, value) for value in values]

    async def _all(self, items: Sequence[Answered]) -> list[Outcome]:
        return await asyncio.gather(*map(self._one, items))

    async def _one(self, item: Answered) -> Outcome:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value = await self._function(item.response, item.problem.answer, item.problem)
                return outcome_of(self._path, value)
        except MemoryError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return Outcome("timeout", message=f"no score within {self._timeout_s:g} s")
            return Outcome("error", message=describe(error))

    def _arguments(self, items: Sequence[Answered]) -> dict[str, Any]:
        """The arguments of TRL that the function takes."""
        ids = [item.token_ids for item in items]
        given = columns(items) | {
            "prompts": [prompt_of(item.problem) for item in items],
            "completions": [_completion(item) for item in items],
        }
        if all(of_item is not None for of_item in ids):
            given["completion_ids"] = [list(of_item or ()) for of_item in ids]
        parameters = inspect.signature(self._function).parameters.values()
        for parameter in parameters:
            required = parameter.default is parameter.empty and parameter.kind in _BY_NAME
            if required and parameter.name not in given:
                found = ", ".join(sorted(given))
                raise UserError(f"{self._path} asks for {parameter.name!r}, which the rows do not have; found: {found}")
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return given
        return {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}

    def _wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._thread.submit(self._loop.run, work).result()

    def close(self) -> None:
        """End the loop of an async function; wait a few seconds for work that does not stop."""
        if "_thread" not in vars(self):
            return
        closed = self._thread.submit(self._loop.close)
        self._thread.shutdown(wait=False)
        del self._thread, self._loop
        if not wait([closed], CLOSE_PATIENCE_S).not_done:
            closed.result()

    @cached_property
    def _loop(self) -> asyncio.Runner:
        """One event loop for all calls: an async client belongs to the loop that it first ran in."""
        return asyncio.Runner()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        """Thread of the event loop: a notebook's thread already runs one."""
        return ThreadPoolExecutor(1, "async reward")


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def with_settings(function: RewardFunction, values: Mapping[str, Any]) -> RewardFunction:
    """The function with the settings that it was registered with, if there are any."""
    part = next((part for part in REWARDS.entries.values() if part.function is function), None)
    if part is None or part.settings is NoSettings:
        return function
    return partial(function, settings=build(part.settings, values))


def load(
    path: str, timeout_s: float, settings: Mapping[str, Any]
) -> Callable[[Sequence[Answered] | None], Form | list[tuple[Any, ...]]]:
    """Scorer for a worker; called with None it returns the function's form. Outcomes are plain tuples, which are
    unpickled three times as fast."""
    own = OwnFunction(path, with_settings(resolve(path), settings), timeout_s)
    return lambda items: own.form if items is None else list(map(tuple, own.outcomes(items)))


def form_of(path: str, function: RewardFunction) -> Form:
    """Form of a function by the names of its parameters; a UserError if they fit none or two."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built into C, without a signature to read
        return Form(False, is_async)
    of_batch = [name for name in BATCH_NAMES if name in signature.parameters]
    of_sample = [name for name in SAMPLE_NAMES if name in signature.parameters]
    if of_batch and of_sample:
        raise UserError(
            f"{path}{signature} is ambiguous: {of_batch[0]!r} is of a function that takes a batch, {of_sample[0]!r} of "
            f"one that takes a sample; rename one"
        )
    if not of_batch:
        try:
            signature.bind("response", "answer", "problem")
        except TypeError as error:
            raise UserError(
                f"{path}{signature} cannot be called as function(response, answer, problem): {error}; one that takes a "
                f"batch names at least one of {', '.join(BATCH_NAMES)}"
            ) from error
    return Form(bool(of_batch), is_async)


def outcome_of(path: str, value: object) -> Outcome:
    """What the reward ``path`` gave for a sample."""
    try:
        return NOT_SCORED if value is None else Outcome("ok", (finite_number(path, value), "ok"))
    except (TypeError, ValueError) as error:
        return Outcome("error", message=describe(error))


def finite_number(path: str, value: object) -> float:
    """A float of any finite number (numpy and one-element tensors too); strings and NaN are errors."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"{path} must return a number, found {type(value).__name__} {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{path} must return a finite number, found one of more digits than a float holds") from None
    if not math.isfinite(number):
        raise ValueError(f"{path} must return a finite number, found {number}")
    return number


def columns(items: Sequence[Answered]) -> dict[str, list[Any]]:
    """Columns by name, None for a row without it: ``id``, ``answer`` and those that the data format did not use."""
    rows = [row_of(item) for item in items]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def row_of(item: Answered) -> dict[str, Any]:
    """Columns of a problem's row, with ``id`` and ``answer``."""
    problem = item.problem
    own = {name: value for name, value in problem.meta.items() if not name.startswith("__")}
    return own | {"id": problem.id, "answer": problem.answer}


def prompt_of(problem: Problem) -> str | list[dict[str, str]]:
    """Prompt as text, or as chat messages with ``role`` and ``content``."""
    prompt = problem.prompt
    return prompt if isinstance(prompt, str) else [{"role": m.role, "content": m.content} for m in prompt]


def _completion(item: Answered) -> str | list[dict[str, str]]:
    """Messages for a chat, text for a text, as in TRL."""
    if isinstance(item.problem.prompt, str):
        return item.response
    return [{"role": "assistant", "content": item.response}]
