"""What an environment is to the trainer: an object of one episode that answers its turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from luffy.types import Message, Problem, ToolCall


@dataclass(frozen=True)
class Turn:
    """What the policy, or a teacher, wrote in one turn: its text without the calls, and the calls. ``fault``: why a
    call in it cannot be read; its ``calls`` are then those that can. ``text``: all that was written, calls included;
    empty where only the parts are known."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    fault: str = ""
    text: str = ""


@dataclass(frozen=True)
class Reply:
    """What an environment answers. Without messages there is nothing to go on from, and the episode ends as with
    ``done``. ``reward``: of this turn, None if it gives none. ``faults``: what went wrong, by kind, e.g.
    ``("unknown_tool",)``; they are counted."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    faults: tuple[str, ...] = ()


class Environment(Protocol):
    """The environment of one episode. Every method may take its time: each is called in a thread of its own, under
    the recipe's time limit, and may raise: the episode then ends and is counted."""

    def start(self, problem: Problem, seed: int) -> str:
        """Begin; the text, if any, is put behind the last user message of the prompt."""
        ...

    def reply(self, turn: Turn) -> Reply:
        """Answer a turn."""
        ...

    def reward(self) -> float | None:
        """The reward of the whole episode; None counts as 0."""
        ...

    def close(self) -> None:
        """Release everything, however the episode ended."""
        ...
