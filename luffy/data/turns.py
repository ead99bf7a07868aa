"""The turns of a chat as its template writes them: an assistant's calls, and what an environment's answer adds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from luffy.data.special_tokens import CLOSE, OPEN, SpecialTokens
from luffy.errors import ConfigError
from luffy.types import THINK, Message, ToolCall

QUESTION = Message("user", "A question.")
ANSWER = f"{OPEN}answer{CLOSE}"
"""Stands for the text of an assistant turn: no other text has it, and it is cut away before texts are tokenised."""
OTHER_TEMPLATE = "give another chat template (data.chat_template)"
OPENED = re.compile(rf"{THINK}\s*\Z")
Row = dict[str, Any]


def template_rows(chat: Sequence[Message], mark: Callable[[str], str]) -> list[Row]:
    """The messages as chat templates take them, their texts through ``mark``. Calls get ids of nine characters, which
    Mistral's templates demand, the same in every turn; results take those of the calls before them, in order."""
    rows, waiting = [], [_call_id(0)]
    for message in chat:
        row: Row = {"role": message.role, "content": mark(message.content)}
        if message.tool_calls:
            waiting = [_call_id(place) for place in range(len(message.tool_calls))]
            named = zip(message.tool_calls, waiting, strict=True)
            row["tool_calls"] = [_call_row(call, name, mark) for call, name in named]
        if message.name:
            row["name"] = mark(message.name)
        if message.role == "tool":
            row["tool_call_id"] = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        rows.append(row)
    return rows


def _call_id(place: int) -> str:
    return f"call{place:05}"


def _call_row(call: ToolCall, name: str, mark: Callable[[str], str]) -> Row:
    arguments = {key: _marked(value, mark) for key, value in call.arguments.items()}
    return {"id": name, "type": "function", "function": {"name": mark(call.name), "arguments": arguments}}


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(key): _marked(inner, mark) for key, inner in value.items()}
    return [_marked(inner, mark) for inner in value] if isinstance(value, list | tuple) else value


class Turn(NamedTuple):
    """An assistant turn: its text without the end token, and that token. ``left_out``: the template has no place for a
    text next to the calls."""

    text: str
    end: str
    left_out: bool


class TurnWriter:
    """Writes single turns, without the chat around them. ``render(rows, opens)`` applies the chat template and, if
    ``opens``, begins the next assistant turn. ``ends``: texts of the tokens that end a turn."""

    def __init__(self, render: Callable[[list[Row], bool], str], special: SpecialTokens, ends: Sequence[str]) -> None:
        self._render, self._special = render, special
        longest_first = sorted(ends, key=len, reverse=True)
        self._ends = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._shown: set[str] = set()  # roles whose messages the template is known to write

    def reply(self, messages: Sequence[Message]) -> str:
        """What the messages add behind an assistant turn: from its end token to the beginning of the next one. Special
        tokens that the messages spell out are marked."""
        for role in {message.role for message in messages} - self._shown:
            if ANSWER not in self._behind_answer([Message(role, ANSWER, name="tool" if role == "tool" else "")]):
                raise ConfigError(f"the chat template leaves out messages of the role {role!r}; {OTHER_TEMPLATE}")
            self._shown.add(role)
        return self._behind_answer(messages)

    def _behind_answer(self, messages: Sequence[Message]) -> str:
        text = self._with_answer(messages)
        place = text.find(ANSWER)
        end = self._ends.search(text, place)
        if place < 0 or end is None:
            what = "rewrites the turns before" if place < 0 else "ends an assistant turn with no special token before"
            raise ConfigError(f"the chat template {what} an environment's answer; {OTHER_TEMPLATE}")
        return text[end.start() :]

    def _with_answer(self, messages: Sequence[Message]) -> str:
        """A chat with an answer and the messages behind it. Results need calls: as many, or one if the template takes
        no more."""
        results = [message.name or "tool" for message in messages if message.role == "tool"]
        refused: TemplateError | None = None
        for count in sorted({len(results), min(len(results), 1)}, reverse=True):
            calls = tuple(ToolCall(name, {"text": ANSWER}) for name in results[:count])
            chat = (QUESTION, Message("assistant", ANSWER, calls), *messages)
            try:
                return self._render(template_rows(chat, self._marked), True)
            except TemplateError as error:
                refused = error
        roles = ", ".join(dict.fromkeys(message.role for message in messages))
        remedy = f"let the environment answer as the user, or {OTHER_TEMPLATE}" if results else OTHER_TEMPLATE
        raise ConfigError(
            f"the chat template refuses an answer of {roles} behind an assistant turn ({refused}); {remedy}"
        )

    def calls(self, content: str, calls: Sequence[ToolCall], mark: Callable[[str], str]) -> Turn:
        """An assistant turn with calls in the model's own format. May raise the template's error."""
        turn = Message("assistant", ANSWER if content else "", tuple(calls))
        results = [Message("tool", "A result.", name=call.name) for call in calls]
        rows = template_rows((QUESTION, turn, *results), lambda text: text if text == ANSWER else mark(text))
        text, header = self._render(rows, False), OPENED.sub("", self._header())
        end = self._ends.search(text, len(header))
        if not text.startswith(header) or end is None:
            raise ConfigError(f"the chat template begins or ends a turn with tool calls otherwise; {OTHER_TEMPLATE}")
        body = text[len(header) : end.start()]
        _, shown, behind = body.partition(ANSWER)
        return Turn(content + behind if shown else body, end[0], bool(content) and not shown)

    def _header(self) -> str:
        return self._render(template_rows([QUESTION], self._marked), True)

    def _marked(self, text: str) -> str:
        return text if text == ANSWER else self._special.mark(text)
