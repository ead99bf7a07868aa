"""Tool calls in the text of an assistant's turn, in the formats of the common chat templates.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>, any number (Qwen2.5, Qwen3, Hermes)
    llama3   {"name": "add", "parameters": {"a": 2}} as all of the text, several with ";" between (Llama 3.1 to 3.3)
    mistral  [TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}], or [TOOL_CALLS]add[ARGS]{"a": 2}
    json     {"name": "add", "arguments": {"a": 2}} anywhere, for models that leave out the tags (Qwen2.5-Coder)

The text must be decoded with its special tokens, apart from the one that ended the turn: some formats are made of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from luffy.environments.protocol import Turn
from luffy.errors import UserError
from luffy.types import END_THINK, THINK, ToolCall

CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?")
BARE_CALL = re.compile(r'\{\s*"name"\s*:')
AROUND_CALL = re.compile(r"```(?:json)?\s*```|<tool_call>\s*</tool_call>")
SHORT = 60  # characters of a call that an error quotes

Read = tuple[str, list[ToolCall]]  # the text without the calls, and the calls
Faults = list[str]


class Unreadable(ValueError):
    """Why a call cannot be read."""


def read_turn(text: str, format: str = "hermes", in_thought: bool = False) -> Turn:
    """Read a turn. Thoughts are not searched for calls; ``in_thought``: the prompt opened the first one."""
    if format not in FORMATS:
        raise UserError(f"unknown format of tool calls {format!r}; known: {', '.join(FORMATS)}")
    thought, rest = _split_thought(text, in_thought)
    faults: Faults = []
    content, calls = FORMATS[format](rest, faults)
    return Turn((thought + content).rstrip() if calls or faults else text, tuple(calls), "; ".join(faults[:1]), text)


def format_of(template: str) -> str:
    """The format of a chat template, by the tags in it; hermes if there are none."""
    if CALLS in template:
        return "mistral"
    if CALL not in template and (PYTHON_TAG in template or '"parameters": ' in template):
        return "llama3"
    return "hermes"


def _split_thought(text: str, in_thought: bool) -> tuple[str, str]:
    """The thought that a turn begins with, tags included, and what follows it."""
    if not (in_thought or text.lstrip().startswith(THINK)):
        return "", text
    cut = _end_of_thought(text, 0)
    return text[:cut], text[cut:]


def _end_of_thought(text: str, start: int) -> int:
    """The place behind a thought; one that never ends goes on to the end of the text."""
    end = text.find(END_THINK, start)
    return len(text) if end < 0 else end + len(END_THINK)


def _read_hermes(text: str, faults: Faults) -> Read:
    """Calls between tags; the JSON in them may hold a tag in a string."""
    kept: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while (start := _next_tag(text, at)) >= 0:
        kept.append(text[at:start])
        if text.startswith(THINK, start):  # a later thought
            at = _end_of_thought(text, start)
            kept.append(text[start:at])
            continue
        at = _hermes_call(text, start + len(CALL), calls, faults)
    return "".join([*kept, text[at:]]), calls


def _next_tag(text: str, at: int) -> int:
    found = [place for tag in (CALL, THINK) if (place := text.find(tag, at)) >= 0]
    return min(found, default=-1)


def _hermes_call(text: str, start: int, calls: list[ToolCall], faults: Faults) -> int:
    """Read one call that begins behind its tag; returns the place behind it."""
    try:
        value, after = _json_at(text, start)
        call = _call_in(value)
        end = _skip_blanks(text, after)
        if not text.startswith(END_CALL, end):
            raise Unreadable(f"{CALL} is never closed" if end == len(text) else "text after the JSON of a call")
        calls.append(call)
    except Unreadable as error:
        end = text.find(END_CALL, start)
        faults.append(str(error) if end >= 0 else f"{CALL} is never closed")
        if end < 0:
            return len(text)
    return end + len(END_CALL)


def _read_llama3(text: str, faults: Faults) -> Read:
    """A turn that is JSON and nothing else; behind the tag it has to be."""
    before, tag, behind = text.partition(PYTHON_TAG)
    body = (behind if tag else text).strip()
    if not tag and not (body.startswith("{") and '"name"' in body):
        return text, []
    calls: list[ToolCall] = []
    try:
        at = 0
        while at < len(body):
            value, at = _json_at(body, at)
            calls.append(_call_in(value, "parameters"))
            at = _skip_blanks(body, at)
            if at < len(body) and body[at] not in ";{":
                raise Unreadable("text after the JSON of a call")
            at += body[at : at + 1] == ";"
        if not calls:
            raise Unreadable(f"no call after {PYTHON_TAG}")
    except Unreadable as error:
        faults.append(str(error))
    return (before if tag else ""), calls


def _read_mistral(text: str, faults: Faults) -> Read:
    """Calls behind each tag: a list of them, or a name and its arguments."""
    content, *parts = text.split(CALLS)
    calls: list[ToolCall] = []
    for part in parts:
        try:
            calls += _mistral_calls(part)
        except Unreadable as error:
            faults.append(str(error))
    return content, calls


def _mistral_calls(part: str) -> Iterator[ToolCall]:
    if part.lstrip().startswith("["):
        values, end = _json_at(part, 0)
        for value in values:
            yield _call_in(value)
    else:
        named = MISTRAL_NAME.match(part)
        if named is None:
            raise Unreadable(f"no name after {CALLS}")
        arguments, end = _json_at(part, named.end())
        yield _call_in({"name": named[1], "arguments": arguments})
    if part[end:].strip():
        raise Unreadable("text after the JSON of a call")


def _read_json(text: str, faults: Faults) -> Read:
    """Objects with a name and arguments, in a code block or not; all else is text."""
    kept: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    for found in BARE_CALL.finditer(text):
        if found.start() < at:  # inside the call before
            continue
        try:
            value, end = _json_at(text, found.start())
            if {"arguments", "parameters"} & value.keys():
                calls.append(_call_in(value))
                kept.append(text[at : found.start()])
                at = end
        except Unreadable as error:
            faults.append(str(error))
    content = "".join([*kept, text[at:]])
    return AROUND_CALL.sub("", content) if calls else text, calls


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins here and the place behind it."""
    start = _skip_blanks(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # half of a character would stop the tokenizer
    except (ValueError, RecursionError):
        raise Unreadable(f"no valid JSON: {' '.join(text[start : start + SHORT].split())!r}") from None
    return value, end


def _call_in(value: Any, key: str = "arguments") -> ToolCall:
    """The call that an object describes. Arguments may be left out, or written as a string with JSON in it."""
    if not isinstance(value, dict):
        raise Unreadable("a call must be a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable("a call without a name")
    arguments: Any = next((value[k] for k in (key, "arguments", "parameters") if value.get(k) is not None), {})
    if isinstance(arguments, str):
        arguments = _json_at(arguments, 0)[0] if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise Unreadable("arguments must be a JSON object")
    return ToolCall(name, arguments)


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)

FORMATS: dict[str, Callable[[str, Faults], Read]] = {
    "hermes": _read_hermes,
    "llama3": _read_llama3,
    "mistral": _read_mistral,
    "json": _read_json,
}
