"""Environments of the package verifiers, 0.2 and 0.3: those that ``load_environment`` gives.

    environment: {name: verifiers, arguments: {id: my-environment, arguments: {difficulty: easy}}}

The package runs the loop of an episode itself and asks a client for each response. Here the client is the policy: it
hands out the messages of the prompt and waits for the next turn. Scores are those of the environment's rubric.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from luffy.data.rows import columns_of
from luffy.environments.answers import (
    DEFAULT_REPLY_CHARS,
    EnvironmentLost,
    Faulty,
    as_reward,
    as_text,
    cut,
    message,
    refused,
)
from luffy.environments.async_calls import SharedLoop
from luffy.environments.kinds import environment
from luffy.environments.protocol import Reply, Turn
from luffy.environments.steps import added, chat_of
from luffy.errors import UserError, needing
from luffy.plugins import in_file
from luffy.rewards.worker import describe
from luffy.schema import knob
from luffy.types import Problem

WHERE = "environment.arguments"


@dataclass(frozen=True)
class VerifiersSettings:
    """Settings of the environment ``verifiers``."""

    id: str = knob("", "an installed environment, or file.py:function that returns one", required=True)
    arguments: dict[str, Any] = knob(factory=dict, help="what load_environment, or that function, gets")


@environment("verifiers", settings=VerifiersSettings, own_reward=True)
def verifiers_environment(settings: VerifiersSettings) -> VerifiersEpisode:
    """One episode. All of a process share the package's object, which keeps nothing of an episode, and an event loop:
    the object may have connections and locks."""
    key = repr(settings)
    with _loading:
        if key not in _loaded:
            _loaded[key] = _load(settings.id, settings.arguments), SharedLoop()
        return VerifiersEpisode(*_loaded[key])


_loading = threading.Lock()
_loaded: dict[str, tuple[Any, SharedLoop]] = {}  # the package's objects by their settings


def _load(name: str, arguments: dict[str, Any]) -> Any:
    make = _loader(name)
    try:
        with _keeping_signals():
            loaded = make(**arguments)
    except (Exception, SystemExit) as error:  # whatever an environment's own code raises
        raise UserError(f"'{WHERE}': {name} gave no environment: {describe(error)}") from error
    if not callable(getattr(loaded, "env_response", None)) or not hasattr(loaded, "rubric"):
        raise UserError(f"'{WHERE}': {name} gave no environment of verifiers with turns, but a {type(loaded).__name__}")
    if loaded.requires_group_rollouts:
        raise UserError(f"'{WHERE}': {name} scores groups of episodes together; only scores of one episode can be used")
    return loaded


@contextmanager
def _keeping_signals() -> Iterator[None]:
    """An environment of the package takes SIGTERM and Ctrl-C when it is made; they are the trainer's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _loader(name: str) -> Callable[..., Any]:
    with needing("environment verifiers needs verifiers 0.2 or 0.3", "verifiers"):
        from verifiers.envs.multiturn_env import MultiTurnEnv  # noqa: F401  # not in 0.4, which runs agents as programs
        from verifiers.utils.env_utils import load_environment
    file, colon, function = name.rpartition(":")
    if not colon:
        return lambda **arguments: load_environment(name, **arguments)
    return in_file(file, function, f"{WHERE}.id", "function")


class VerifiersEpisode:
    """One episode: a task that runs the package's loop of turns, beside those of other episodes."""

    def __init__(self, env: Any, loop: SharedLoop) -> None:
        self._env, self._loop, self.max_reply_chars = env, loop, DEFAULT_REPLY_CHARS
        self.tools = [
            {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"})}
            for tool in env.tool_defs or ()
        ]
        self._policy: Any = None  # the client that the package asks
        self._task: asyncio.Task[Any] | None = None
        self._works = False  # whether the package is at work, not waiting for a turn
        self._messages: list[Any] = []  # of the conversation so far
        self._names: dict[str, str] = {}  # tools by the id of their call

    def start(self, problem: Problem, seed: int) -> str:
        """Begin; the text is what the environment put behind the row's prompt."""
        messages = chat_of(problem)
        row = {"example_id": 0, "info": {}, **columns_of(problem), "prompt": messages}
        first = self._loop.call(self._begin, {**row, "answer": problem.answer})
        if first is None:
            raise EnvironmentLost("the environment ended the episode before the first turn")
        shown = [{"role": one.role, "content": _text(one)} for one in first]
        return cut(added(messages, shown), self.max_reply_chars)[0]

    def reply(self, turn: Turn) -> Reply:
        """Give the turn to the environment; wait until it asks for another one, or ends."""
        if turn.fault:
            return refused(Faulty("unreadable_call", f"the call cannot be read: {turn.fault}"))
        answer = self._loop.call(self._take, turn)
        if answer is None:
            return Reply(done=True)
        named = [(one.role, _text(one), self._names.get(getattr(one, "tool_call_id", ""), "")) for one in answer]
        shown = [message(role, text, self.max_reply_chars, name) for role, text, name in named]
        return Reply(tuple(one for one, _ in shown), faults=tuple(kind for _, kinds in shown for kind in kinds))

    def reward(self) -> float | None:
        """The score of the rubric."""
        return as_reward(self._loop.call(self._scored))

    def close(self) -> None:
        """End the episode; the package cleans up. What hangs is cancelled."""
        if self._task is not None:
            self._loop.call(self._end, self._task)

    async def _begin(self, row: dict[str, Any]) -> list[Any] | None:
        self._policy = policy_client()
        self._task = asyncio.create_task(self._env.rollout(row, self._policy, "policy", {}))
        return await self._asked()

    async def _take(self, turn: Turn) -> list[Any] | None:
        self._policy.turns.put_nowait(turn)
        return await self._asked()

    async def _asked(self) -> list[Any] | None:
        """The new messages with which the package asks for the next turn; None where the episode has ended."""
        assert self._task is not None
        prompt = asyncio.ensure_future(self._policy.prompts.get())
        self._works = True
        await asyncio.wait({prompt, self._task}, return_when=asyncio.FIRST_COMPLETED)
        self._works = False
        if not prompt.done():
            prompt.cancel()
            self._check(self._task.result())
            return None
        known, self._messages = self._messages, prompt.result()
        if self._messages[: len(known)] != known:
            raise EnvironmentLost("the environment rewrites earlier messages; tokens can only be appended")
        new = self._messages[len(known) :]
        for one in new:
            self._names.update({call.id: call.name for call in getattr(one, "tool_calls", None) or ()})
        return new[1:] if known else new  # the first is the policy's turn

    async def _over(self) -> Any:
        """The state after the last turn; an episode that a limit of luffy ended gets no further one."""
        assert self._task is not None
        self._policy.turns.put_nowait(None)
        return await self._task

    async def _end(self, task: asyncio.Task[Any]) -> None:
        if self._works:
            task.cancel()
        self._policy.turns.put_nowait(None)
        await asyncio.gather(task, return_exceptions=True)

    async def _scored(self) -> Any:
        if self._task is None:
            return None
        state = await self._over()
        self._check(state)
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return state["reward"]

    def _check(self, state: Any) -> None:
        if state.get("error") is not None:
            raise EnvironmentLost(f"the environment broke off: {describe(state['error'])}")


def policy_client() -> Any:
    """A client of the package whose responses are the policy's turns; None among them ends the episode."""
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage, ToolCall

    class Policy(Client):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(None)
            self.prompts: asyncio.Queue[Any] = asyncio.Queue()
            self.turns: asyncio.Queue[Turn | None] = asyncio.Queue()

        async def get_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> Any:
            self.prompts.put_nowait(list(prompt))
            turn = await self.turns.get()
            if turn is None:
                raise OverlongPromptError("a limit ended the episode")
            calls = [
                ToolCall(id=uuid.uuid4().hex, name=call.name, arguments=json.dumps(call.arguments))
                for call in turn.calls
            ]
            text = turn.content if calls else turn.text or turn.content
            said = ResponseMessage(content=text, tool_calls=calls or None, finish_reason=None, is_truncated=False)
            return Response(id=uuid.uuid4().hex, created=0, model=model, message=said)

    Policy.__abstractmethods__ = frozenset()  # get_response needs none of them
    return Policy()


def _text(one: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(one.content, str) or one.content is None:
        return as_text(one.content)
    parts = [getattr(part, "text", None) for part in one.content]
    if None in parts:
        raise EnvironmentLost("a message of the environment has parts that are no text")
    return as_text("".join(map(str, parts)))
