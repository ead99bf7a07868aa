"""What the chats of a data file consist of: turns, roles in order, calls of tools and their results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from luffy.data.chats import SHAREGPT_ROLES, parsed_json

SHOWN = 5
QUANTILES = {"p5": 5, "p50": 50, "p95": 95, "max": 100}
_ONE = re.compile(r"(?<!\S)(\S+)(?: \1(?!\S))+")
_TWO = re.compile(r"(?<!\S)(\S+ \S+)(?: \1(?!\S))+")


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """p5, p50, p95 and maximum: observed values, so that a budget can be read off."""
    if not len(lengths):
        return {}
    values = np.percentile(np.asarray(lengths), list(QUANTILES.values()), method="higher")
    return {name: int(value) for name, value in zip(QUANTILES, values, strict=True)}


def chat_report(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The report as data, of rows with their names; a chat without an assistant turn is a prompt and does not count."""
    turns, calls = [], []
    counts: Counter[str] = Counter()
    tools: Counter[str] = Counter()
    roles: Counter[str] = Counter()
    faults: dict[str, dict[str, Any]] = {}
    for name, row in rows:
        for chat in _chats(row):
            speakers = [_role(turn) for turn in chat]
            if "assistant" not in speakers:
                continue
            named = [_names(turn) for turn in chat]
            turns.append(speakers.count("assistant"))
            calls.append(sum(map(len, named)))
            tools.update(tool for some in named for tool in some)
            roles[_TWO.sub(r"(\1)+", _ONE.sub(r"\1+", " ".join(speakers)))] += 1
            nulls = [turn.get("content") is None for turn, made in zip(chat, named, strict=True) if made]
            counts["null"] += sum(nulls)
            for fault in _faults(chat):
                found = faults.setdefault(fault, {"count": 0, "first": name})
                found["count"] += 1
    return {
        "count": len(turns),
        "single_turn": turns.count(1),
        "with_calls": sum(map(bool, calls)),
        "turns": quantiles(turns),
        "calls": quantiles(calls),
        "tools": dict(tools.most_common()),
        "roles": dict(roles.most_common()),
        "null_content": counts["null"],
        "faults": faults,
    }


def _chats(value: Any) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Every list of turns in a row, at any depth."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += reversed(list(value.values()))
        elif isinstance(value, list) and value:
            if all(isinstance(turn, Mapping) and _role(turn) for turn in value):
                yield value
            else:
                left += reversed(value)


def _role(turn: Mapping[str, Any]) -> str:
    role = turn.get("role") or SHAREGPT_ROLES.get(str(turn.get("from")))
    return role if isinstance(role, str) else ""


def _calls(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = parsed_json(turn.get("value")) if turn.get("from") == "function_call" else turn.get("tool_calls")
    return [call for call in (calls if isinstance(calls, list) else [calls]) if isinstance(call, Mapping)]


def _names(turn: Mapping[str, Any]) -> list[str]:
    """Names of the tools that a turn calls."""
    functions = [call.get("function", call) for call in _calls(turn)]
    return [str(function.get("name")) for function in functions if isinstance(function, Mapping)]


def _faults(chat: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What does not match between calls and results: a kind for each turn of a tool, or turn with calls."""
    asked, open_calls = False, 0
    ids: set[str] = set()
    for turn in chat:
        if _role(turn) == "tool":
            if not asked:
                yield "results behind no call"
            elif turn.get("tool_call_id") is not None and str(turn["tool_call_id"]) not in ids:
                yield "results with the id of no call before them"
            open_calls -= 1
        else:
            if asked and open_calls:
                yield "turns with another number of results than of calls"
            ids = {str(call["id"]) for call in _calls(turn) if call.get("id") is not None}
            asked, open_calls = bool(_names(turn)), len(_names(turn))
    if asked and open_calls > 0:
        yield "chats that end before the results of their last calls"


def chat_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report for people; nothing if there are no chats."""
    if not report["count"]:
        return
    several = f"{report['count'] - report['single_turn']:,} with several; {report['with_calls']:,} with tool calls"
    yield f"chats       {report['count']:,}: {report['single_turn']:,} with one assistant turn, {several}"
    for what in ("turns", "calls") if report["with_calls"] else ("turns",):
        yield f"  {what:<9} " + "  ".join(f"{name} {value:,}" for name, value in report[what].items())
    yield from _first(report["tools"], "tool")
    yield from _first(report["roles"], "roles")
    if report["null_content"]:
        yield f"  null      {report['null_content']:,} turns are calls without content"
    for what, found in report["faults"].items():
        yield f"warning     {found['count']:,} {what}, first: {found['first']}"


def _first(counted: Mapping[str, int], what: str) -> Iterator[str]:
    for name, count in list(counted.items())[:SHOWN]:
        yield f"  {what:<9} {count:,} {name[:100]}"
    if len(counted) > SHOWN:
        yield f"  {what:<9} and {len(counted) - SHOWN:,} more: --json names them"
