"""Read chats: turns, tool calls and results as messages, and the part of a chat that is a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from luffy.data.rows import RowView
from luffy.data.sources import shown
from luffy.types import Message, ToolCall, Trace

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def read_messages(row: RowView, column: str, chat: Sequence[Any], start: int = 0) -> tuple[Message, ...]:
    """Read a chat, which begins at ``start`` of the column. A result belongs to the call with its id, else with
    its name, else to the next call without a result. Results are put in the order of their calls, because templates may
    show no ids."""
    messages: list[Message] = []
    places: list[int] = []  # of the messages: a result's call among its turn's, -1 for all others
    calls = _Calls()
    for place, item in enumerate(chat, start):
        message, at = read_message(row, f"{column}[{place}]", item), -1
        if message.tool_calls:
            calls.ask([call.get("id") for call in item["tool_calls"]], [call.name for call in message.tool_calls])
        if message.role == "tool":
            at, name = calls.answer(item.get("tool_call_id"), message.name)
            message = Message("tool", message.content, name=name)
        before = len(messages)
        while before and 0 <= at < places[before - 1]:
            before -= 1
        messages.insert(before, message)
        places.insert(before, at)
    return tuple(messages)


class _Calls:
    """The calls of a chat so far, and those of the last turn that have no result yet."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}  # by id
        self._waiting: list[tuple[int, Any, str]] = []  # place in the turn, id, name

    def ask(self, ids: Sequence[Any], names: Sequence[str]) -> None:
        """A turn has calls."""
        self._waiting = list(zip(range(len(ids)), ids, names, strict=True))
        self._names |= {call: name for call, name in zip(ids, names, strict=True) if isinstance(call, str)}

    def answer(self, call_id: Any, name: str) -> tuple[int, str]:
        """The call of a result: its place in the last turn, -1 if it is not there, and its name."""
        known = self._names.get(call_id, "") if isinstance(call_id, str) else ""
        own = [call for call in self._waiting if (call[2] == name if call_id is None else call[1] == call_id)]
        found = next(iter(own or self._waiting[: not known]), None)
        if found is None:
            return -1, name or known
        self._waiting.remove(found)
        return found[0], name or found[2]


def read_message(row: RowView, column: str, item: Any) -> Message:
    """Read one turn. Only a turn with calls may be without text."""
    values = item if isinstance(item, Mapping) else {}
    role, name = values.get("role"), values.get("name")
    calls = read_calls(row, f"{column}.tool_calls", values.get("tool_calls")) if role == "assistant" else ()
    content = text_of(values.get("content"))
    content = "" if content is None and calls and values.get("content") is None else content
    if not isinstance(role, str) or content is None:
        raise row.fault(column, f"expected a chat message with text 'role' and 'content', found {shown(item)}")
    return Message(role, content, calls, name if role == "tool" and isinstance(name, str) else "")


def text_of(content: Any) -> str | None:
    """A text, or a list of text parts as one text; None if it is neither."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def read_calls(row: RowView, column: str, value: Any) -> tuple[ToolCall, ...]:
    """Read a list of calls, in OpenAI's form or as plain ``{"name", "arguments"}``; None: there are none."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise row.fault(column, f"expected a list of calls, found {shown(value)}")
    return tuple(_read_call(row, f"{column}[{place}]", call) for place, call in enumerate(value))


def _read_call(row: RowView, column: str, item: Any) -> ToolCall:
    call = item.get("function", item) if isinstance(item, Mapping) else None
    name = call.get("name") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(name, str) or not name:
        raise row.fault(column, f"expected a call with 'name' and 'arguments', found {shown(item)}")
    arguments = parsed_json(call.get("arguments") or {})
    if not isinstance(arguments, Mapping):
        what = f"expected an object or its JSON text, found {shown(call.get('arguments'))}"
        raise row.fault(f"{column}.arguments", what)
    return ToolCall(name, dict(arguments))


def parsed_json(value: Any) -> Any:
    """The value of JSON text; None if it is no JSON, or nested too deeply. Other values stay."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


# ---- traces


def uses_tools(chat: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat has calls of tools or results."""
    return any(turn.get("role") == "tool" or turn.get("tool_calls") for turn in chat)


def trace_start(row: RowView, column: str, chat: Sequence[Mapping[str, Any]]) -> int:
    """Where the trace of a chat begins; its length: all of it is prompt. With ``turns="all"``, and in every chat with
    tools, that is the first assistant turn behind a question."""
    whole = row.options.turns == "all" or uses_tools(chat)
    roles = [turn.get("role") for turn in chat]
    if whole and roles[-1] == "tool":
        what = f"expected an assistant turn behind the last result of a tool, found {shown(chat[-1])}"
        raise row.fault(f"{column}[{len(chat) - 1}]", what)
    if roles[-1] != "assistant":
        return len(chat)
    asked = roles.index("user") if "user" in roles else 0
    return roles.index("assistant", asked) if whole and "assistant" in roles[asked:] else len(chat) - 1


def read_conversation(row: RowView, column: str, chat: Sequence[Mapping[str, Any]], start: int = 0) -> Trace:
    """Read the turns behind a prompt, from ``start`` of the column, as a trace: a text if it is one turn without
    calls."""
    if len(chat) == 1 and chat[0].get("role") == "assistant" and not chat[0].get("tool_calls"):
        return Trace(text=assistant_text(row, f"{column}[{start}]", chat))
    messages = read_messages(row, column, [with_thoughts(turn) for turn in chat], start)
    for place, (message, next_one) in enumerate(zip(messages, [*messages[1:], None], strict=True)):
        fault = _turn_fault(message, next_one, place)
        if fault is not None:
            raise row.fault(f"{column}[{start + place}]", f"{fault}, found {shown(chat[place])}")
    return Trace(messages=messages)


def _turn_fault(message: Message, next_one: Message | None, place: int) -> str | None:
    """What keeps a turn from being part of a trace."""
    speaks = message.role == "assistant"
    if not speaks and place == 0:
        return "expected a trace to begin with an assistant turn, without the prompt"
    if not speaks and next_one is None:
        return "expected a trace to end with an assistant turn"
    if speaks and next_one is not None and next_one.role == "assistant":
        return "expected an answer between two assistant turns"
    if speaks and not message.content.strip() and not message.tool_calls:
        return "expected an assistant turn with text or tool calls"
    return None


def read_chat_trace(row: RowView, column: str, chat: Sequence[Mapping[str, Any]]) -> Trace:
    """Read a trace that is written as a chat. Beside a single assistant turn there may be turns of others."""
    turns = sum(turn.get("role") == "assistant" for turn in chat)
    if turns > 1 or (turns and uses_tools(chat)):
        return read_conversation(row, column, chat)
    return Trace(text=assistant_text(row, column, chat))


def assistant_text(row: RowView, column: str, chat: Sequence[Mapping[str, Any]]) -> str:
    turns = [text_of(with_thoughts(turn).get("content")) for turn in chat if turn.get("role") == "assistant"]
    if len(turns) != 1 or turns[0] is None or not turns[0].strip():
        raise row.fault(column, f"expected an assistant message with text, found {shown(chat)}")
    return turns[0]


def with_thoughts(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """The turn with its thoughts in its content, as a model writes them: many servers return them apart, as
    ``reasoning_content`` or ``reasoning``."""
    thoughts, given = turn.get("reasoning_content") or turn.get("reasoning"), turn.get("content")
    content = "" if given is None else text_of(given)
    if turn.get("role") != "assistant" or not isinstance(thoughts, str) or content is None or "</think>" in content:
        return turn
    return {**turn, "content": f"<think>\n{thoughts.strip()}\n</think>\n\n{content.lstrip()}"}


# ---- ShareGPT


def sharegpt_chat(row: RowView, turns: Sequence[Any]) -> list[dict[str, Any]]:
    """Chat messages of ShareGPT's turns. Calls join an assistant turn right before them."""
    chat: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        message = _sharegpt_turn(row, f"conversations[{place}]", turn)
        before = chat[-1] if chat and chat[-1].get("role") == "assistant" else None
        if before is not None and isinstance(turn, Mapping) and turn.get("from") == "function_call":
            before["tool_calls"] = [*(before.get("tool_calls") or []), *message["tool_calls"]]
        else:
            chat.append(message)
    return chat


def _sharegpt_turn(row: RowView, where: str, turn: Any) -> dict[str, Any]:
    """Chat message of a turn. Some files already have ``role`` and ``content`` there."""
    if not isinstance(turn, Mapping):
        raise row.fault(where, f"expected a turn with 'from' and 'value', found {shown(turn)}")
    if "role" in turn:
        return dict(turn)
    role, known = SHAREGPT_ROLES.get(str(turn.get("from"))), ", ".join(SHAREGPT_ROLES)
    if role is None:
        raise row.fault(f"{where}.from", f"expected one of {known}, found {shown(turn.get('from'))}")
    if turn.get("from") != "function_call":
        return {"role": role, "content": turn.get("value")}
    found = parsed_json(turn.get("value"))
    if found is None:
        raise row.fault(f"{where}.value", f"expected a call as JSON, found {shown(turn.get('value'))}")
    calls = found if isinstance(found, list) else [found]
    read_calls(row, f"{where}.value", calls)
    return {"role": role, "content": None, "tool_calls": calls}
