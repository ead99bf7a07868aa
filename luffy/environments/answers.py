"""What an environment hands back, as text for the policy; mistakes are short texts of a kind that is counted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from numbers import Number
from typing import Any, Literal

from luffy.environments.protocol import Reply
from luffy.rewards.worker import describe
from luffy.types import Message

FaultKind = Literal[
    "unreadable_call", "unknown_tool", "wrong_arguments", "tool_raised", "odd_answer", "cut_answer", "wrong_action"
]
DEFAULT_REPLY_CHARS = 4000
LONGEST_ERROR = 300  # characters
CUT = " [cut]"


class EnvironmentLost(RuntimeError):
    """An environment that cannot go on, e.g. a server that is gone: its episode ends."""


class Faulty(Exception):
    """Something that went wrong in a turn: the policy reads ``text``, ``kind`` is counted."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(text)
        self.kind: FaultKind = kind
        self.text = f"error: {clean(text)}"[:LONGEST_ERROR]


class OddAnswer(Faulty):
    """An answer that is no text and cannot be written as one."""

    def __init__(self, text: str) -> None:
        super().__init__("odd_answer", text)


@contextmanager
def told_to_the_policy() -> Iterator[None]:
    """Around code of an environment: what it raises becomes a fault, unless the environment is lost."""
    try:
        yield
    except (EnvironmentLost, OddAnswer):
        raise
    except (Exception, SystemExit) as error:
        raise Faulty("tool_raised", describe(error)) from error


def as_text(answer: Any) -> str:
    """Text as it is, None as nothing, numbers as they are written, lists and mappings as JSON; else OddAnswer."""
    if answer is None:
        return ""
    if isinstance(answer, str):
        return clean(answer)
    if isinstance(answer, Number | Decimal) and not isinstance(answer, bool):
        return str(answer)
    try:
        return clean(json.dumps(answer, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        raise OddAnswer(f"the answer is a {type(answer).__name__}, not text or JSON") from None


def clean(text: str) -> str:
    """Without halves of characters, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def cut(text: str, most: int) -> tuple[str, tuple[FaultKind, ...]]:
    """At most so many characters, and the fault if there were more."""
    if len(text) <= most:
        return text, ()
    return text[: max(most - len(CUT), 0)] + CUT[:most], ("cut_answer",)


def message(role: str, text: str, most: int, name: str = "") -> tuple[Message, tuple[FaultKind, ...]]:
    shown, faults = cut(text, most)
    return Message(role, shown, name=name), faults


def as_reply(reply: Any) -> Reply:
    """A reply as an environment must give it, its reward as a float; a TypeError or ValueError says what is wrong."""
    if not isinstance(reply, Reply):
        raise TypeError(f"reply must return a Reply, not {type(reply).__name__}")
    if not all(isinstance(one, Message) and _has_text(one) for one in reply.messages):
        raise TypeError("the messages of a Reply must be Messages with text")
    if isinstance(reply.faults, str):  # a tuple of one without its comma
        raise TypeError("the faults of a Reply must be a tuple of texts")
    messages = tuple(replace(one, content=clean(one.content)) for one in reply.messages)
    return replace(reply, messages=messages, reward=as_reward(reply.reward), faults=tuple(reply.faults))


def _has_text(one: Message) -> bool:
    return all(isinstance(text, str) for text in (one.role, one.content, one.name or ""))


def refused(fault: Faulty, role: str = "tool", name: str = "") -> Reply:
    """The reply that tells the policy about one fault."""
    return Reply((Message(role, fault.text, name=name),), faults=(fault.kind,))


def as_reward(value: Any) -> float | None:
    """A reward as a float; None stays None. A ValueError where it is no finite number."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str | bytes) or not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number or None, got {str(value)[:50]!r}")
    return number
