"""Environments with ``reset`` and ``step``: the policy's text is the action, the observation is the next user message.

    gymnasium   reset(seed=) -> (observation, info); step(action) -> (observation, reward, terminated, truncated, info)
    SkyRL-gym   init(messages) -> (messages, info); step(text) -> mapping with observations, reward, done; made with
                extras=, the row of its episode
    plain       reset() -> text; step(text) -> (observation, reward, done), or with info behind

``reset`` may also take columns of the row by their names. Each method may be ``async``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from luffy.data.rows import columns_of
from luffy.environments.answers import (
    DEFAULT_REPLY_CHARS,
    FaultKind,
    Faulty,
    as_reward,
    as_text,
    cut,
    message,
    refused,
    told_to_the_policy,
)
from luffy.environments.async_calls import AsyncCalls
from luffy.environments.protocol import Reply, Turn
from luffy.environments.tools import row_for
from luffy.rewards.extract import after_thought
from luffy.rewards.own_function import prompt_of
from luffy.types import Message, Problem

WHOLE_NUMBER = re.compile(r"-?\d+")
Stepped = tuple[Any, float | None, bool]  # observation, reward, done


class StepEnvironment:
    """One episode with an object that has ``reset`` or ``init``, and ``step``. Its reward is the sum of the steps'.
    ``of_row``: makes the object from the row instead, when the episode starts."""

    def __init__(
        self,
        thing: Any,
        max_reply_chars: int = DEFAULT_REPLY_CHARS,
        of_row: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self._thing, self._most, self._of_row = thing, max_reply_chars, of_row
        self._calls = AsyncCalls()
        self._total: float | None = None

    def start(self, problem: Problem, seed: int) -> str:
        """The first observation. SkyRL-gym's ``init`` gets the prompt; what it adds behind it is the text."""
        if self._of_row is not None:
            self._thing = self._of_row(extras_of(problem))
        if hasattr(self._thing, "init"):
            prompt = chat_of(problem)
            found = self._calls.call(self._thing.init, list(prompt))
            text = added(prompt, found[0] if isinstance(found, tuple) else found)
        else:
            named = row_for(self._thing.reset, problem, seed, type(self._thing).__name__)
            named = {name: value for name, value in named.items() if name != "options"}
            found = self._calls.call(self._thing.reset, **named)
            text = as_text(_observed(found[0] if isinstance(found, tuple) else found))
        return cut(text, self._most)[0]

    def reply(self, turn: Turn) -> Reply:
        """Take one step."""
        try:
            observation, reward, done = self._step(turn.text or turn.content)
            shown, faults = self._shown(observation)
        except Faulty as fault:
            return refused(fault, role="user")
        if reward is not None:
            self._total = reward + (self._total or 0.0)
        return Reply(shown, done, reward, faults)

    def reward(self) -> float | None:
        """The sum of the rewards; None if no step gave one."""
        return self._total

    def close(self) -> None:
        """Call ``close``, if there is one."""
        self._calls.close_with(self._thing)

    def _step(self, text: str) -> Stepped:
        action = action_in(text, getattr(self._thing, "action_space", None))
        with told_to_the_policy():
            return read_step(self._calls.call(self._thing.step, action))

    def _shown(self, observation: Any) -> tuple[tuple[Message, ...], tuple[FaultKind, ...]]:
        shown: list[Message] = []
        faults: list[FaultKind] = []
        for role, content in _spoken(observation):
            one, cut_off = message(role, as_text(_observed(content)), self._most)
            shown += [one] if one.content else []
            faults += cut_off
        return tuple(shown), tuple(faults)


def extras_of(problem: Problem) -> dict[str, Any]:
    """The row as SkyRL-gym takes it: the answer is in ``reward_spec``, unless the row has one."""
    row = {"reward_spec": {"ground_truth": problem.answer}, "extra_info": {}, **columns_of(problem)}
    return {**row, "id": problem.id, "prompt": prompt_of(problem), "answer": problem.answer}


def action_in(text: str, space: Any = None) -> Any:
    """The text itself; for gymnasium's ``Discrete`` the last whole number behind the thoughts."""
    if type(space).__name__ != "Discrete":
        return text
    numbers = WHOLE_NUMBER.findall(after_thought(text))
    first, count = int(getattr(space, "start", 0)), int(space.n)
    if numbers and len(numbers[-1]) < 20 and first <= int(numbers[-1]) < first + count:
        return int(numbers[-1])
    raise Faulty("wrong_action", f"answer with one whole number from {first} to {first + count - 1}")


def read_step(result: Any) -> Stepped:
    """What ``step`` returned, in any of the forms."""
    if isinstance(result, Mapping):
        if not {"observations", "reward", "done"} <= result.keys():
            raise TypeError("a mapping that step returns must have observations, reward and done")
        return result.get("observations"), as_reward(result.get("reward")), bool(result.get("done"))
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, _ = result
        return observation, as_reward(reward), bool(terminated) or bool(truncated)
    if isinstance(result, tuple) and len(result) in (3, 4):
        return result[0], as_reward(result[1]), bool(result[2])
    raise TypeError(f"step must return 3 to 5 values or a mapping, not {type(result).__name__}")


def added(prompt: Sequence[Mapping[str, str]], first: Any) -> str:
    """The text that ``init`` put behind the prompt: new messages, or a longer last one."""
    messages = _spoken(first)
    if not messages or [content for _, content in messages] == [m["content"] for m in prompt]:
        return ""
    common = 0
    while common < min(len(prompt), len(messages)) and messages[common][1] == prompt[common]["content"]:
        common += 1
    new = [as_text(content) for _, content in messages[common:]]
    if common < len(prompt):
        new[0] = new[0].removeprefix(prompt[common]["content"]).lstrip("\n")
    return "\n\n".join(new)


def chat_of(problem: Problem) -> list[dict[str, str]]:
    """The prompt as chat messages, a question as one of the user's."""
    prompt = prompt_of(problem)
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _spoken(observation: Any) -> list[tuple[str, Any]]:
    """Messages as (role, content): an observation is one of the user's, unless it is a list of messages."""
    if isinstance(observation, list) and all(isinstance(m, Mapping) and "content" in m for m in observation):
        return [(str(m.get("role", "user")), m["content"]) for m in observation]
    return [("user", observation)]


def _observed(observation: Any) -> Any:
    """Arrays and their numbers as Python's own."""
    return observation.tolist() if hasattr(observation, "tolist") else observation
