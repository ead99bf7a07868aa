"""Read a raw row as a ``Problem``: one reader per known layout, and one for the user's column map.

A reader raises a ``RowError`` that names file, row, column and value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from luffy.data.chats import read_chat_trace, read_conversation, read_messages, sharegpt_chat, trace_start
from luffy.data.rows import ABSENT, ROW_KEY, RowView, column_names, is_blank, log_prob_fault, lookup, none_if_blank
from luffy.data.sources import JsonFloat, RowError, shown
from luffy.errors import ConfigError
from luffy.types import Message, Problem, Trace

CALCULATOR = re.compile(r"<<.*?>>")
COLUMN_KEYS = ("prompt", "answer", "traces", "id", "source", "teacher", "log_probs", "hints")
LABELS = ("correctness_math_verify", "correctness_llama")
"""Columns of OpenR1 that judge its generations: Math-Verify's verdicts, a language model's."""
Reader = Callable[[RowView], Problem]


# ---- readers, one per layout -------------------------------------------------------------------------


def read_verl(row: RowView) -> Problem:
    """Read verl's layout: ``prompt`` is a chat, ``target`` one trace (or a list), ``target_lst`` several."""
    column = "target" if row.get("target_lst") is None else "target_lst"
    used = ("reward_model", "target", "target_lst")
    return build(row, answer="reward_model.ground_truth", traces=column, id=None, source="data_source", used=used)


def read_openr1(row: RowView) -> Problem:
    """Read OpenR1-Math. Traces are the generations judged correct: by Math-Verify, else by the language model, else
    all of them."""
    read = _correct_generations(row)
    problem = build(row, prompt="problem", traces="generations", id=None, used=LABELS, read=read)
    return replace(problem, source=problem.source or "openr1")


def read_gsm8k(row: RowView) -> Problem:
    """Read GSM8K: the worked solution is the trace, the gold answer follows its last ``####``."""
    solution = row.get("answer")
    if not isinstance(solution, str) or "####" not in solution:
        raise row.unexpected("answer", "a solution ending in '#### <answer>'", solution)
    gold = solution.rpartition("####")[2].strip().replace(",", "")
    if not gold:
        raise row.unexpected("answer", "an answer after '####'", solution)
    text = CALCULATOR.sub("", solution) if row.options.strip_calculator else solution
    row = replace(row, values={**row.values, "answer": gold})
    read = (Trace(text=text, teacher="human"),)
    return replace(build(row, prompt="question", traces="answer", id=None, source=None, read=read), source="gsm8k")


def read_completion(row: RowView) -> Problem:
    """Read ``{"prompt", "completion", "answer"?}``: the completion is the trace."""
    return build(row, traces="completion", read=read_traces(row, "completion", row.get("completion")))


def read_chat(row: RowView, column: str = "messages") -> Problem:
    """Read ``{"messages", "answer"?}``: an assistant turn at the end of the chat is the trace, the turns before it are
    the prompt. With ``turns="all"``, or with tools, the trace begins at the first assistant turn. A chat that ends
    with another's turn is all prompt."""
    chat = row.get(column)
    if not _is_chat(chat):
        raise row.unexpected(column, "a non-empty list of chat messages", chat)
    ends = trace_start(row, column, chat)
    read = (read_conversation(row, column, chat[ends:], ends),) if ends < len(chat) else ()
    row = replace(row, values={**row.values, column: chat[:ends]})
    return build(row, prompt=column, traces=column, read=read)


def read_sharegpt(row: RowView) -> Problem:
    """Read ``{"conversations", "system"?, "answer"?}``: a chat whose turns are called ``from`` and ``value``. The
    value of a turn from ``function_call`` is JSON: a call, or a list of calls."""
    values, turns = dict(row.values), row.get("conversations")
    if _is_full_list(turns):
        values["conversations"] = [*_system_turn(row), *sharegpt_chat(row, turns)]
        values.pop("system", None)
    return read_chat(replace(row, values=values), "conversations")


def _system_turn(row: RowView) -> list[dict[str, str]]:
    text = row.text("system")
    return [] if text is None else [{"role": "system", "content": text}]


def read_alpaca(row: RowView) -> Problem:
    """Read ``{"instruction", "input"?, "output", "system"?, "answer"?}``: the output is the trace, the input follows
    the instruction."""
    if row.get("history"):
        raise row.fault("history", "earlier turns are not read here", "write such rows as messages or leave them out")
    question = row.text("instruction")
    if question is None:
        raise row.unexpected("instruction", "a non-empty string", row.get("instruction"))
    given, system = row.text("input"), _system_turn(row)
    question = question if given is None else f"{question}\n\n{given}"
    prompt = [*system, {"role": "user", "content": question}] if system else question
    row = replace(row, values={**row.values, "instruction": prompt})
    return build(row, prompt="instruction", traces="output", used=("input", "system", "history"))


def read_columns(row: RowView) -> Problem:
    """Read the columns of the user's map. Rewards may ask for the answer's column, so it stays in ``meta``."""
    columns = row.options.columns
    problem = build(
        row,
        prompt=columns["prompt"],
        answer=columns.get("answer", "answer"),
        traces=columns.get("traces", "traces"),
        id=columns.get("id"),
        source=columns.get("source"),
        read=_mapped_traces(row) if "traces" in columns else (),
    )
    hints = {"hints": row.get(columns["hints"])} if "hints" in columns else {}
    return replace(problem, meta=_meta(row, {columns[key] for key in columns if key != "answer"}) | hints)


READERS: dict[str, Reader] = {
    "luffy": lambda row: build(row),
    "verl": read_verl,
    "openr1": read_openr1,
    "gsm8k": read_gsm8k,
    "completion": read_completion,
    "messages": read_chat,
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
    "columns": read_columns,
}
LAYOUTS = {
    "luffy": "prompt, answer, traces?",
    "verl": "prompt, reward_model.ground_truth, data_source?, target? or target_lst?",
    "openr1": "problem, answer, generations?",
    "gsm8k": "question, answer with ####",
    "completion": "prompt, completion, answer?",
    "messages": "messages, answer?",
    "sharegpt": "conversations, answer?",
    "alpaca": "instruction, input?, output, answer?",
}
CHATS = ("messages", "sharegpt")
"""Layouts in which a chat is prompt and trace in one."""
TRACE_COLUMNS = {
    "luffy": ("traces",),
    "verl": ("target", "target_lst"),
    "openr1": ("generations",),
    "completion": ("completion",),
}


def detect(row: Mapping[str, Any]) -> str | None:
    """Name of the layout of a row, or None."""
    fits = {
        "verl": "prompt" in row and row.keys() & {"reward_model", "target", "target_lst"},
        "openr1": "problem" in row and row.keys() & {"answer", "generations"},
        "gsm8k": "question" in row and "####" in str(row.get("answer")),
        "completion": "prompt" in row and "completion" in row and "traces" not in row,
        "luffy": "prompt" in row,
        "messages": "messages" in row,
        "sharegpt": "conversations" in row,
        "alpaca": "instruction" in row and "output" in row,
    }
    return next((name for name, does in fits.items() if does), None)


def overlooked_trace(row: RowView, layout: str) -> RowError | None:
    """The error for a row whose trace is in a column that the layout of its file does not have, or None."""
    own = TRACE_COLUMNS.get(layout)
    if own is None or any(_is_there(row.get(column)) for column in own):
        return None
    others = (column for other, columns in TRACE_COLUMNS.items() if other != layout for column in columns)
    for column in others:
        if _is_there(row.get(column)):
            fault = f"holds a trace, but the file is read as {layout} ({LAYOUTS[layout]}), as its first row is"
            advice = "make the rows alike, put them in files of their own, or set data.format or data.columns"
            return row.fault(column, fault, advice)
    return None


def _is_there(value: Any) -> bool:
    return any(not is_blank(item) for item in value) if isinstance(value, list) else none_if_blank(value) is not None


def unknown_layout(where: str, row: Mapping[str, Any]) -> RowError:
    known = "; ".join(f"{name} ({columns})" for name, columns in LAYOUTS.items())
    fault = f"no known schema fits the columns {column_names(row)}; known: {known}"
    return RowError(where, fault, "schema", "name the columns with data.columns in a recipe, or with --column")


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse a column map that names no prompt or an unknown field."""
    unknown = sorted(columns.keys() - set(COLUMN_KEYS))
    if unknown:
        raise ConfigError(f"data.columns: unknown field {unknown[0]!r}; known: {', '.join(COLUMN_KEYS)}")
    if "prompt" not in columns:
        raise ConfigError("data.columns: names no prompt column; add prompt: <column>")
    if "traces" not in columns and columns.keys() & {"teacher", "log_probs"}:
        raise ConfigError("data.columns: teacher and log_probs describe traces; add traces: <column>")


def without_traces(columns: Mapping[str, str]) -> dict[str, str]:
    """Column map for held-out problems, whose rows may have no traces."""
    return {key: column for key, column in columns.items() if key not in ("traces", "teacher", "log_probs", "hints")}


# ---- fields ------------------------------------------------------------------------------------------


def build(
    row: RowView,
    *,
    prompt: str = "prompt",
    answer: str = "answer",
    traces: str = "traces",
    id: str | None = "id",
    source: str | None = "source",
    used: tuple[str, ...] = (),
    read: tuple[Trace, ...] | None = None,
) -> Problem:
    """Read the fields that all layouts share from the named columns; columns that are not used become ``meta``.

    ``read``: the traces, if a layout reads them itself. ``used``: further columns to leave out of ``meta``.
    """
    found = read_traces(row, traces, none_if_blank(row.get(traces))) if read is None else read
    text = read_prompt(row, prompt)
    proposed = {"prompt": prompt, "answer": "..."} | ({"traces": traces} if found else {})
    gold = read_gold(row, answer, {} if traces == prompt else proposed)  # a chat is prompt and trace in one
    if row.options.require_traces and not found:
        raise _no_trace(row, traces)
    named = read_id(row, id)
    origin = read_source(row, source) if source else ""
    meta = _meta(row, {prompt, answer, traces, id, source, *used})
    return Problem(id=named, prompt=text, answer=gold, traces=found, source=origin, meta=meta)


def _meta(row: RowView, used: set[str | None]) -> dict[str, Any]:
    return {ROW_KEY: row.where} | {key: value for key, value in row.values.items() if key not in used}


def read_id(row: RowView, column: str | None) -> str:
    value = row.get(column) if column else None
    if value is None:
        return row.default_id
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise row.unexpected(str(column), "a string or a whole number", value)
    return str(value)


def read_source(row: RowView, column: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise row.unexpected(column, "a string", value)
    return value or ""


def read_prompt(row: RowView, column: str) -> str | tuple[Message, ...]:
    value = row.get(column)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        return read_messages(row, column, value)
    raise row.unexpected(column, "a non-empty string or a list of chat messages", value)


def read_gold(row: RowView, column: str, columns: Mapping[str, str]) -> str:
    """Gold answer exactly as written; a list of one answer is unpacked. ``columns``: the column map to propose if the
    column is absent; empty if no map can help."""
    value = row.get(column)
    if value is None and not row.options.require_answer:
        return ""
    if value is None and lookup(row.values, column) is ABSENT:
        proposed = ", ".join(f"{key}: {name}" for key, name in columns.items())
        named = (
            f"name the answers with data.columns={{{proposed}}} or --column" if columns else f"add the column {column}"
        )
        what = f"expected a string, but the row has only {column_names(row.values)}"
        raise row.fault(column, what, f"{named}, or train on traces alone with luffy sft")
    only = value[0] if isinstance(value, list) and len(value) == 1 else value
    text = _gold_text(only)
    if text is None or not text.strip():
        raise row.unexpected(column, "a non-empty string" if only == "" else "a string", value)
    return text


def _gold_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, JsonFloat):
        return value.text
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return str(value) if isinstance(value, int | float | Decimal) else None


def _without_blank(values: Any, traces: Any) -> Any:
    """Drop the values of blank traces from a list with one value per trace."""
    if not isinstance(values, list) or not isinstance(traces, list) or len(values) != len(traces):
        return values
    return [value for value, trace in zip(values, traces, strict=True) if not is_blank(trace)]


def read_traces(row: RowView, column: str, value: Any) -> tuple[Trace, ...]:
    """Read one trace or a list of them; None, an empty list and blank texts in a list are no trace."""
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or _is_token_ids(value) or _is_chat(value):
        return (read_trace(row, column, value),)
    if not isinstance(value, list):
        raise row.unexpected(column, "a trace or a list of traces", value)
    return tuple(read_trace(row, f"{column}[{place}]", item) for place, item in enumerate(value) if not is_blank(item))


def _is_token_ids(value: Any) -> bool:
    return _is_full_list(value) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _is_chat(value: Any) -> bool:
    return _is_full_list(value) and all(isinstance(item, Mapping) and "role" in item for item in value)


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def read_trace(row: RowView, column: str, item: Any) -> Trace:
    """Read a text, token ids, a chat whose assistant turns are the trace, or an object with these."""
    if isinstance(item, str) and item.strip():
        return Trace(text=item)
    if _is_token_ids(item):
        return Trace(token_ids=_token_ids(row, column, item))
    if _is_chat(item):
        return read_chat_trace(row, column, item)
    if isinstance(item, Mapping):
        return read_chat_trace(row, column, [item]) if "role" in item else _trace_parts(row, column, item)
    expected = "a non-empty string, token ids, or an object with 'text' or 'token_ids'"
    raise row.fault(column, f"expected {expected}, found {shown(item)}")


def _trace_parts(row: RowView, column: str, item: Mapping[str, Any]) -> Trace:
    given = {key: item[key] for key in ("text", "token_ids", "messages") if item.get(key) is not None}
    log_probs, teacher = item.get("log_probs"), item.get("teacher")
    if len(given) != 1:
        raise row.fault(column, f"expected one of 'text', 'token_ids' and 'messages', found {shown(dict(item))}")
    if teacher is not None and not isinstance(teacher, str):
        raise row.fault(f"{column}.teacher", f"expected a string, found {shown(teacher)}")
    ((key, value),) = given.items()
    if key == "token_ids":
        trace = Trace(token_ids=_token_ids(row, f"{column}.token_ids", value))
    else:
        trace = read_trace(row, f"{column}.{key}", value)
    trace = replace(trace, teacher=teacher or trace.teacher)
    return with_log_probs(row, f"{column}.log_probs", trace, log_probs)


def _token_ids(row: RowView, column: str, ids: Any) -> tuple[int, ...]:
    if not _is_token_ids(ids) or min(ids) < 0:
        raise row.fault(column, f"expected a list of token ids, found {shown(ids)}")
    return tuple(ids)


def with_log_probs(row: RowView, column: str, trace: Trace, values: Any) -> Trace:
    """The trace with its recorded log-probs; None: it has none."""
    if values is None:
        return trace
    if trace.token_ids is None:
        raise row.fault(column, "recorded log-probs need the token ids they belong to, but the trace is text")
    if not isinstance(values, list):
        raise row.fault(column, f"expected a list of numbers, found {shown(values)}")
    wrong = log_prob_fault(values)
    if wrong:
        raise row.fault(column, wrong)
    # The EOS may be missing from either list; the encoder, which knows the tokenizer, checks which.
    if abs(len(values) - len(trace.token_ids)) > 1:
        raise row.fault(column, f"expected {len(trace.token_ids)} numbers, one per token id, found {len(values)}")
    return replace(trace, log_probs=tuple(float(value) for value in values))


def _no_trace(row: RowView, column: str) -> RowError:
    if lookup(row.values, column) is ABSENT:
        what = f"traces are required, but the row has only {column_names(row.values)}"
        return row.fault(column, what, "add the column or map another with data.columns.traces")
    return row.fault(column, "traces are required, but the row has no usable one")


def _correct_generations(row: RowView) -> tuple[Trace, ...]:
    generations = row.get("generations")
    read = read_traces(row, "generations", generations)
    traces = tuple(replace(trace, teacher="DeepSeek-R1") for trace in read)
    for column in LABELS:
        verdicts = _without_blank(row.get(column), generations)
        if verdicts is None:
            continue
        if not isinstance(verdicts, list) or len(verdicts) != len(traces):
            raise row.unexpected(column, f"a list of {len(traces)} verdicts, one per generation", verdicts)
        for verdict in verdicts:
            if verdict is not None and as_verdict(verdict) is None:
                raise row.unexpected(column, "verdicts that are true or false (1 or 0)", verdict)
        return tuple(trace for trace, verdict in zip(traces, verdicts, strict=True) if as_verdict(verdict))
    return traces


def as_verdict(value: Any) -> bool | None:
    """Verdict on a generation, written true and false or 1 and 0; None if it is neither."""
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def _mapped_traces(row: RowView) -> tuple[Trace, ...]:
    columns = row.options.columns
    value = row.get(columns["traces"])
    traces = read_traces(row, columns["traces"], none_if_blank(value))
    if "teacher" in columns:
        names = _per_trace(row, columns["teacher"], value, len(traces), lambda value: isinstance(value, str))
        traces = tuple(replace(t, teacher=n or t.teacher) for t, n in zip(traces, names, strict=True))
    if "log_probs" in columns:
        column = columns["log_probs"]
        lists = _per_trace(row, column, value, len(traces), _is_flat_list)
        traces = tuple(with_log_probs(row, column, t, values) for t, values in zip(traces, lists, strict=True))
    return traces


def _is_flat_list(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(item, list) or item is None for item in value)


def _per_trace(row: RowView, column: str, traces: Any, count: int, is_single: Callable[[Any], bool]) -> list[Any]:
    """Values of a column with one value for all traces or a list with one for each; ``count``: traces that are not
    blank."""
    value = row.get(column)
    if value is None:
        return [None] * count
    if is_single(value) and not (isinstance(value, list) and count != 1):
        return [value] * count
    value = _without_blank(value, traces)
    if not isinstance(value, list) or len(value) != count:
        raise row.unexpected(column, f"one value for each of the {count} traces", value)
    return value
