"""Tools as TRL knows them: a class whose public methods the policy may call, recognised by what it has.

    class Shop:
        def reset(self, budget: int = 10, **row) -> str | None: ...   # optional; columns of the row, text to add
        def buy(self, item: str) -> str: ...                         # a tool: type hints, and a docstring with Args:
        def get_reward(self) -> float: ...                            # optional: of the episode
        def close(self) -> None: ...                                  # optional

Each may be ``async``. What goes wrong in a call is told to the policy in a short text, and counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from luffy.data.rows import columns_of
from luffy.environments.answers import (
    DEFAULT_REPLY_CHARS,
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
from luffy.environments.tool_schemas import Schema, checked, schemas_of
from luffy.errors import UserError
from luffy.rewards.own_function import prompt_of
from luffy.types import Problem, ToolCall


class ToolEnvironment:
    """One episode with an object that has tools."""

    def __init__(
        self, thing: Any, schemas: Mapping[str, Schema] | None = None, max_reply_chars: int = DEFAULT_REPLY_CHARS
    ) -> None:
        self._thing, self._most = thing, max_reply_chars
        self._schemas = schemas_of(thing) if schemas is None else schemas
        self._calls = AsyncCalls()

    def start(self, problem: Problem, seed: int) -> str:
        """Call ``reset`` with the columns it takes."""
        if not hasattr(self._thing, "reset"):
            return ""
        named = row_for(self._thing.reset, problem, seed, type(self._thing).__name__)
        return cut(as_text(self._calls.call(self._thing.reset, **named)), self._most)[0]

    def reply(self, turn: Turn) -> Reply:
        """Answer the calls in their order; without any the episode ends."""
        replies = [self._answer(call) for call in turn.calls]
        if turn.fault:
            replies.append(refused(Faulty("unreadable_call", f"the call cannot be read: {turn.fault}")))
        messages = tuple(message for reply in replies for message in reply.messages)
        return Reply(messages, done=not replies, faults=tuple(kind for reply in replies for kind in reply.faults))

    def reward(self) -> float | None:
        """What ``get_reward`` says."""
        if not hasattr(self._thing, "get_reward"):
            return None
        return as_reward(self._calls.call(self._thing.get_reward))

    def close(self) -> None:
        """Call ``close``, and end what is still running in the background."""
        self._calls.close_with(self._thing)

    def _answer(self, call: ToolCall) -> Reply:
        try:
            text = self._result(call)
        except Faulty as fault:
            return refused(fault, name=call.name[:64])
        answer, faults = message("tool", text, self._most, call.name)
        return Reply((answer,), faults=faults)

    def _result(self, call: ToolCall) -> str:
        schema = self._schemas.get(call.name)
        if schema is None:
            raise Faulty("unknown_tool", f"no tool {call.name[:64]!r}; tools: {', '.join(self._schemas)}")
        arguments = checked(call.arguments, schema)
        with told_to_the_policy():
            return as_text(self._calls.call(getattr(self._thing, call.name), **arguments))


def row_for(function: Callable[..., Any], problem: Problem, seed: int, owner: str) -> dict[str, Any]:
    """The arguments of a ``reset``: those of its names that the row has, all columns for ``**row``."""
    row = {**columns_of(problem), "id": problem.id, "prompt": prompt_of(problem), "answer": problem.answer}
    taken: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            taken = {**{str(k): v for k, v in row.items()}, **taken}
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif name == "seed":
            taken[name] = seed
        elif name in row:
            taken[name] = row[name]
        elif parameter.default is parameter.empty:
            known = ", ".join(sorted(map(str, row)))
            raise UserError(f"{owner}.reset needs {name!r}, which row {problem.id} does not have; columns: {known}")
    return taken
