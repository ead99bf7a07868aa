"""From a raw row to a ``Problem``: one small reader per known layout, and the user's own column map.

A reader takes a ``RowView`` (the values, where they came from, what is required) and returns a ``Problem`` or
raises a ``RowError`` that names file, row, column and value.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from luffy.data.sources import FIX_OR_SKIP, JsonFloat, RowError, shown
from luffy.errors import ConfigError
from luffy.types import Message, Problem, Trace

CALCULATOR = re.compile(r"<<.*?>>")
COLUMN_KEYS = ("prompt", "answer", "traces", "id", "source", "teacher", "log_probs", "hints")
ROW_KEY = "__row__"
"""Key of ``Problem.meta`` that holds ``file:row``, so that later errors can name the row."""
ABSENT = object()
LONGEST_NAMES = 300
LOWEST = -sys.float_info.max  # a whole number may be lower, and no float holds it
SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
LABELS = ("correctness_math_verify", "correctness_llama")
"""Columns of OpenR1 that judge its generations: Math-Verify's verdicts, a language model's."""


@dataclass(frozen=True)
class ReadOptions:
    require_answer: bool = True
    require_traces: bool = False
    strip_calculator: bool = True
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RowView:
    """One row with what a reader needs to judge it."""

    values: Mapping[str, Any]
    where: str
    default_id: str
    options: ReadOptions = ReadOptions()

    def get(self, column: str) -> Any:
        """The value at a column or dotted path; None when it is not there."""
        value = lookup(self.values, column)
        return None if value is ABSENT else value

    def fault(self, column: str, what: str, advice: str = FIX_OR_SKIP) -> RowError:
        return RowError(self.where, f"column {column!r}: {what}", column, advice)

    def unexpected(self, column: str, expected: str, value: Any) -> RowError:
        if value is None and lookup(self.values, column) is ABSENT:
            return self.fault(column, f"expected {expected}, but the row has only {column_names(self.values)}")
        return self.fault(column, f"expected {expected}, found {shown(value)}")


def column_names(row: Mapping[str, Any]) -> str:
    """For a message: on one line, and not longer than a message may be."""
    names = " ".join(", ".join(row).split())
    return (names if len(names) <= LONGEST_NAMES else f"{names[:LONGEST_NAMES]}...") or "(none)"


Reader = Callable[[RowView], Problem]


def lookup(values: Mapping[str, Any], column: str) -> Any:
    """The value at ``column``, which may be a dotted path into nested columns; ABSENT when it is not there."""
    if column in values:
        return values[column]
    head, dot, rest = column.partition(".")
    inner = values.get(head) if dot else None
    return lookup(inner, rest) if isinstance(inner, Mapping) else ABSENT


# ---- readers, one per layout -------------------------------------------------------------------------


def read_own(row: RowView) -> Problem:
    """``{"id"?, "prompt", "answer", "traces"?, "source"?}``."""
    traces = read_traces(row, "traces", none_if_blank(row.get("traces")))
    return build(row, used=("id", "prompt", "answer", "traces", "source"), traces=traces)


def read_verl(row: RowView) -> Problem:
    """``prompt`` is a chat, ``target`` one trace (or a list), ``target_lst`` several."""
    column = "target_lst" if row.get("target_lst") is not None else "target"
    return build(
        row,
        used=("prompt", "reward_model", "data_source", "target", "target_lst"),
        answer_column="reward_model.ground_truth",
        source=read_source(row, "data_source", ""),
        traces=read_traces(row, column, none_if_blank(row.get(column))),
        trace_column=column,
        id_column=None,
    )


def read_openr1(row: RowView) -> Problem:
    """Only the generations judged correct become traces: Math-Verify's verdict, else the LLM judge's, else all."""
    return build(
        row,
        used=("problem", "answer", "source", "generations", *LABELS),
        prompt_column="problem",
        source=read_source(row, "source", "openr1"),
        traces=_correct_generations(row),
        trace_column="generations",
        id_column=None,
    )


def read_gsm8k(row: RowView) -> Problem:
    """The worked solution is the trace; the gold answer follows its last ``####``."""
    solution = row.get("answer")
    if not isinstance(solution, str) or "####" not in solution:
        raise row.unexpected("answer", "a solution ending in '#### <answer>'", solution)
    gold = solution.rpartition("####")[2].strip().replace(",", "")
    if not gold:
        raise row.unexpected("answer", "an answer after '####'", solution)
    text = CALCULATOR.sub("", solution) if row.options.strip_calculator else solution
    return build(
        row,
        used=("question", "answer"),
        prompt_column="question",
        answer=gold,
        source="gsm8k",
        traces=(Trace(text=text, teacher="human"),),
        id_column=None,
    )


def read_completion(row: RowView) -> Problem:
    """``{"prompt", "completion", "answer"?}``: the completion is the trace."""
    traces = read_traces(row, "completion", row.get("completion"))
    used = ("id", "prompt", "completion", "answer", "source")
    return build(row, used=used, traces=traces, trace_column="completion")


def read_chat(row: RowView) -> Problem:
    """``{"messages", "answer"?}``: an assistant turn at the end of the chat is the trace, what comes before it the
    prompt; without one the whole chat is the prompt."""
    return _read_chat(row, "messages", row.get("messages"))


def read_sharegpt(row: RowView) -> Problem:
    """``{"conversations", "system"?, "answer"?}``: a chat whose turns are called ``from`` and ``value``."""
    turns = row.get("conversations")
    chat = turns
    if _is_full_list(turns):
        chat = [*_system_turn(row), *(_sharegpt_turn(row, place, turn) for place, turn in enumerate(turns))]
    return _read_chat(row, "conversations", chat)


def _read_chat(row: RowView, column: str, chat: Any) -> Problem:
    if not _is_chat(chat):
        raise row.unexpected(column, "a non-empty list of chat messages", chat)
    ends = len(chat) - 1 if chat[-1].get("role") == "assistant" else len(chat)
    traces = read_traces(row, f"{column}[{ends}]", chat[ends]) if ends < len(chat) else ()
    return build(
        replace(row, values={**row.values, column: chat[:ends]}),
        used=("id", column, "answer", "source", *(("system",) if column == "conversations" else ())),
        prompt_column=column,
        traces=traces,
        trace_column=column,
    )


def _sharegpt_turn(row: RowView, place: int, turn: Any) -> dict[str, Any]:
    """As a chat message. Some files already have ``role`` and ``content`` there."""
    where = f"conversations[{place}]"
    if not isinstance(turn, Mapping):
        raise row.fault(where, f"expected a turn with 'from' and 'value', found {shown(turn)}")
    if "role" in turn:
        return dict(turn)
    role = SHAREGPT_ROLES.get(str(turn.get("from")))
    if role is None:
        raise row.fault(
            f"{where}.from", f"expected one of {', '.join(SHAREGPT_ROLES)}, found {shown(turn.get('from'))}"
        )
    return {"role": role, "content": turn.get("value")}


def _system_turn(row: RowView) -> list[dict[str, str]]:
    """The column ``system`` as the first message of a chat; none where it is blank."""
    text = none_if_blank(row.get("system"))
    if text is None:
        return []
    if not isinstance(text, str):
        raise row.unexpected("system", "a string", text)
    return [{"role": "system", "content": text}]


def read_alpaca(row: RowView) -> Problem:
    """``{"instruction", "input"?, "output", "system"?, "answer"?}``: the output is the trace; the input stands behind
    the instruction."""
    if row.get("history"):
        raise row.fault("history", "earlier turns are not read here", "write such rows as messages or leave them out")
    question = row.get("instruction")
    if not isinstance(question, str) or not question.strip():
        raise row.unexpected("instruction", "a non-empty string", question)
    given = none_if_blank(row.get("input"))
    if given is not None and not isinstance(given, str):
        raise row.unexpected("input", "a string", given)
    question = question if given is None else f"{question}\n\n{given}"
    system = _system_turn(row)
    prompt = [*system, {"role": "user", "content": question}] if system else question
    return build(
        replace(row, values={**row.values, "instruction": prompt}),
        used=("id", "instruction", "input", "output", "system", "history", "answer", "source"),
        prompt_column="instruction",
        traces=read_traces(row, "output", none_if_blank(row.get("output"))),
        trace_column="output",
    )


def read_columns(row: RowView) -> Problem:
    """Whatever the user's column map says."""
    columns = row.options.columns
    traces = _mapped_traces(row) if "traces" in columns else ()
    problem = build(
        row,
        used=tuple(column for field, column in columns.items() if field != "answer"),  # for rewards that ask for it
        prompt_column=columns["prompt"],
        answer_column=columns.get("answer", "answer"),
        source=read_source(row, columns["source"], "") if "source" in columns else "",
        traces=traces,
        trace_column=columns.get("traces", "traces"),
        id_column=columns.get("id"),
    )
    if "hints" not in columns:
        return problem
    return replace(problem, meta={**problem.meta, "hints": row.get(columns["hints"])})


READERS: dict[str, Reader] = {
    "luffy": read_own,
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
    if "prompt" in row and row.keys() & {"reward_model", "target", "target_lst"}:
        return "verl"
    if "problem" in row and row.keys() & {"answer", "generations"}:
        return "openr1"
    if "question" in row and "####" in str(row.get("answer")):
        return "gsm8k"
    if "prompt" in row and "completion" in row and "traces" not in row:
        return "completion"
    if "prompt" in row:
        return "luffy"
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "sharegpt"
    return "alpaca" if "instruction" in row and "output" in row else None


def overlooked_trace(row: RowView, layout: str) -> RowError | None:
    """What is wrong with a row whose trace stands where the layout of its file has none."""
    own = TRACE_COLUMNS.get(layout)
    if own is None or any(_is_there(row.get(column)) for column in own):
        return None
    for other, columns in TRACE_COLUMNS.items():
        for column in columns:
            if other != layout and _is_there(row.get(column)):
                fault = f"holds a trace, but the file is read as {layout} ({LAYOUTS[layout]}), as its first row is"
                advice = "make the rows alike, put them in files of their own, or set data.format or data.columns"
                return RowError(row.where, f"column {column!r}: {fault}", column, advice)
    return None


def _is_there(value: Any) -> bool:
    return any(not _is_blank(item) for item in value) if isinstance(value, list) else none_if_blank(value) is not None


def unknown_layout(where: str, row: Mapping[str, Any]) -> RowError:
    known = "; ".join(f"{name} ({columns})" for name, columns in LAYOUTS.items())
    return RowError(
        where,
        f"no known schema fits the columns {column_names(row)}; known: {known}",
        "schema",
        "name the columns with data.columns in a recipe, or with --column",
    )


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
    """The map for held-out problems: they need no traces, so a column of traces need not be there."""
    return {key: column for key, column in columns.items() if key not in ("traces", "teacher", "log_probs", "hints")}


# ---- fields ------------------------------------------------------------------------------------------


def build(
    row: RowView,
    used: tuple[str, ...],
    traces: tuple[Trace, ...],
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    trace_column: str = "traces",
    id_column: str | None = "id",
    answer: str | None = None,
    source: str | None = None,
) -> Problem:
    """Read the fields all layouts share, and keep the unused columns for whoever needs them."""
    prompt = read_prompt(row, prompt_column)
    columns = {"prompt": prompt_column, "answer": "..."} | ({"traces": trace_column} if traces else {})
    columns = {} if trace_column == prompt_column else columns  # a chat is prompt and trace in one
    gold = read_gold(row, answer_column, columns) if answer is None else answer
    if row.options.require_traces and not traces:
        raise _no_trace(row, trace_column)
    return Problem(
        id=read_id(row, id_column),
        prompt=prompt,
        answer=gold,
        traces=traces,
        source=read_source(row, "source", "") if source is None else source,
        meta={ROW_KEY: row.where} | {key: value for key, value in row.values.items() if key not in used},
    )


def read_id(row: RowView, column: str | None) -> str:
    value = row.get(column) if column else None
    if value is None:
        return row.default_id
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise row.unexpected(str(column), "a string or a whole number", value)
    return str(value)


def read_source(row: RowView, column: str, default: str) -> str:
    value = row.get(column)
    if value is None:
        return default
    if not isinstance(value, str):
        raise row.unexpected(column, "a string", value)
    return value


def read_prompt(row: RowView, column: str) -> str | tuple[Message, ...]:
    value = row.get(column)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        return tuple(read_message(row, f"{column}[{place}]", item) for place, item in enumerate(value))
    raise row.unexpected(column, "a non-empty string or a list of chat messages", value)


def read_message(row: RowView, column: str, item: Any) -> Message:
    role, content = (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise row.fault(column, f"expected a chat message with text 'role' and 'content', found {shown(item)}")
    return Message(role, content)


def read_gold(row: RowView, column: str, columns: Mapping[str, str]) -> str:
    """The gold answer exactly as written. Some verl files wrap it in a list of one. ``columns`` is the map to
    propose where there is no such column; empty where none can help."""
    value = row.get(column)
    if value is None and not row.options.require_answer:
        return ""
    if value is None and lookup(row.values, column) is ABSENT:
        proposed = ", ".join(f"{key}: {name}" for key, name in columns.items())
        named = f"name the answers with data.columns={{{proposed}}} or --column"
        if not columns:
            named = f"add the column {column}"
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


def none_if_blank(value: Any) -> Any:
    """Flat files write an absent trace as an empty text."""
    return None if _is_blank(value) else value


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _of_kept(values: Any, traces: Any) -> Any:
    """Of a list that has one value for each of the traces, those of the traces that are not blank."""
    if not isinstance(values, list) or not isinstance(traces, list) or len(values) != len(traces):
        return values
    return [value for value, trace in zip(values, traces, strict=True) if not _is_blank(trace)]


def read_traces(row: RowView, column: str, value: Any) -> tuple[Trace, ...]:
    """One trace or a list of them; None, an empty list and empty texts in a list are no trace."""
    if value is None:
        return ()
    if _is_one_trace(value):
        return (read_trace(row, column, value),)
    if not isinstance(value, list):
        raise row.unexpected(column, "a trace or a list of traces", value)
    return tuple(read_trace(row, f"{column}[{place}]", item) for place, item in enumerate(value) if not _is_blank(item))


def _is_one_trace(value: Any) -> bool:
    return isinstance(value, str | Mapping) or _is_token_ids(value) or _is_chat(value)


def _is_token_ids(value: Any) -> bool:
    return _is_full_list(value) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _is_chat(value: Any) -> bool:
    return _is_full_list(value) and all(isinstance(item, Mapping) and "role" in item for item in value)


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def read_trace(row: RowView, column: str, item: Any) -> Trace:
    """Text, token ids, a chat whose one assistant turn is the trace, or an object with its parts."""
    if isinstance(item, str) and item.strip():
        return Trace(text=item)
    if _is_token_ids(item):
        return Trace(token_ids=_token_ids(row, column, item))
    if _is_chat(item):
        return Trace(text=_assistant_text(row, column, item))
    if isinstance(item, Mapping):
        return Trace(text=_assistant_text(row, column, [item])) if "role" in item else _trace_parts(row, column, item)
    expected = "a non-empty string, token ids, or an object with 'text' or 'token_ids'"
    raise row.fault(column, f"expected {expected}, found {shown(item)}")


def _assistant_text(row: RowView, column: str, chat: Iterable[Mapping[str, Any]]) -> str:
    turns = [turn.get("content") for turn in chat if turn.get("role") == "assistant"]
    if len(turns) != 1 or not isinstance(turns[0], str) or not turns[0].strip():
        raise row.fault(column, f"expected exactly one assistant message with text, found {shown(chat)}")
    return turns[0]


def _trace_parts(row: RowView, column: str, item: Mapping[str, Any]) -> Trace:
    text, ids, log_probs, teacher = (item.get(key) for key in ("text", "token_ids", "log_probs", "teacher"))
    if (text is None) == (ids is None):
        raise row.fault(column, f"expected either 'text' or 'token_ids', found {shown(dict(item))}")
    if teacher is not None and not isinstance(teacher, str):
        raise row.fault(f"{column}.teacher", f"expected a string, found {shown(teacher)}")
    if text is not None:
        trace = read_trace(row, f"{column}.text", text)
    else:
        trace = Trace(token_ids=_token_ids(row, f"{column}.token_ids", ids))
    trace = replace(trace, teacher=teacher or trace.teacher)
    return trace if log_probs is None else with_log_probs(row, f"{column}.log_probs", trace, log_probs)


def _token_ids(row: RowView, column: str, ids: Any) -> tuple[int, ...]:
    if not _is_token_ids(ids) or min(ids) < 0:
        raise row.fault(column, f"expected a list of token ids, found {shown(ids)}")
    return tuple(ids)


def with_log_probs(row: RowView, column: str, trace: Trace, values: Any) -> Trace:
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


def log_prob_fault(values: Iterable[Any]) -> str | None:
    """What is wrong with the first value that is no log-probability, or None."""
    for place, value in enumerate(values):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not LOWEST <= value <= 0:
            return f"expected finite log-probs of at most 0, found {shown(value)} at position {place}"
    return None


def _no_trace(row: RowView, column: str) -> RowError:
    if lookup(row.values, column) is ABSENT:
        what = f"traces are required, but the row has only {column_names(row.values)}"
        return row.fault(column, what, "add the column or map another with data.columns.traces")
    return row.fault(column, "traces are required, but the row has no usable one")


def _correct_generations(row: RowView) -> tuple[Trace, ...]:
    generations = row.get("generations")
    traces = read_traces(row, "generations", generations)
    traces = tuple(replace(trace, teacher="DeepSeek-R1") for trace in traces)
    for column in LABELS:
        verdicts = _of_kept(row.get(column), generations)
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
    """A verdict on a generation, written true and false or 1 and 0; None where it is neither."""
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def _mapped_traces(row: RowView) -> tuple[Trace, ...]:
    columns = row.options.columns
    value = row.get(columns["traces"])
    traces = read_traces(row, columns["traces"], none_if_blank(value))
    if "teacher" in columns:
        names = _per_trace(row, columns["teacher"], value, len(traces), lambda value: isinstance(value, str))
        traces = tuple(replace(t, teacher=n or t.teacher) for t, n in zip(traces, names, strict=True))
    if "log_probs" in columns:
        lists = _per_trace(row, columns["log_probs"], value, len(traces), _is_flat_list)
        column = columns["log_probs"]
        traces = tuple(
            trace if values is None else with_log_probs(row, column, trace, values)
            for trace, values in zip(traces, lists, strict=True)
        )
    return traces


def _is_flat_list(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(item, list) or item is None for item in value)


def _per_trace(row: RowView, column: str, traces: Any, count: int, is_single: Callable[[Any], bool]) -> list[Any]:
    """A column that says one thing of each trace: a single value (for all of them) or a list as long. ``count`` of the
    ``traces`` are not blank."""
    value = row.get(column)
    if value is None:
        return [None] * count
    if is_single(value) and not (isinstance(value, list) and count != 1):
        return [value] * count
    value = _of_kept(value, traces)
    if not isinstance(value, list) or len(value) != count:
        raise row.unexpected(column, f"one value for each of the {count} traces", value)
    return value
