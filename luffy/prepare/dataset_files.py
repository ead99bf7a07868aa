"""Parquet files of problems: schema, types of other columns, writer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from luffy.data import ProblemDataset
from luffy.data.rows import ROW_KEY
from luffy.data.schemas import TRACE_COLUMNS
from luffy.errors import DataError
from luffy.prepare.journal import Record, whole_text
from luffy.types import Message, Problem

logger = logging.getLogger(__name__)

ROWS_PER_GROUP = 512
TRACE_FIELDS = {
    "token_ids": pa.list_(pa.int32()),
    "log_probs": pa.list_(pa.float32()),
    "score": pa.float32(),
}
OTHER_LAYOUTS = {"reward_model", "problem", *(column for columns in TRACE_COLUMNS.values() for column in columns)}
"""Columns by which a reader would take the output for another layout, or look for traces there."""
QUESTION = pa.string()
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
CALL = pa.struct(
    [("name", pa.string()), ("arguments", pa.string())]
)  # arguments: JSON text, for no type holds them all
TURNS = pa.list_(pa.struct([*MESSAGE, ("tool_calls", pa.list_(CALL)), ("name", pa.string())]))


def message_rows(messages: Sequence[Message]) -> list[Record]:
    """Messages as ``TURNS`` has them."""
    return [
        {
            "role": message.role,
            "content": whole_text(message.content),
            "tool_calls": [{"name": c.name, "arguments": json.dumps(c.arguments)} for c in message.tool_calls] or None,
            "name": message.name or None,
        }
        for message in messages
    ]


def traces_schema(problems: ProblemDataset, keep_traces: bool = False, turns: bool = False) -> pa.Schema:
    """Schema of problems with traces: luffy's columns, and the others that ``problems`` have. ``turns``: new traces may
    have several."""
    kept = (trace for problem in problems for trace in problem.traces if keep_traces)
    turns = turns or any(trace.messages is not None for trace in kept)
    fields = {**TRACE_FIELDS, "messages": TURNS} if turns else TRACE_FIELDS
    schema = problem_schema(fields, _type_of_prompts(problems))
    found = column_types(lambda: (problem.meta for problem in problems))
    others = {name: kind for name, kind in found.items() if name not in (ROW_KEY, *schema.names)}
    written = {name: kind for name, kind in others.items() if kind is not None and name not in OTHER_LAYOUTS}
    if left_out := [name for name in others if name not in written]:
        why = "values that no one type of Parquet holds, or a name that means another layout"
        logger.warning("%s: columns left out of the output: %s (%s)", problems.source.path, ", ".join(left_out), why)
    return pa.schema([*schema, *written.items()])


def _type_of_prompts(problems: ProblemDataset) -> pa.DataType:
    """A Parquet column has one type, so a file with both questions and chats is an error."""
    kinds = {_type_of_prompt(problem) for problem in problems}
    if QUESTION in kinds and len(kinds) > 1:
        raise DataError(f"{problems.source.path}: has both questions and chats as prompts; split the file in two")
    return TURNS if TURNS in kinds else kinds.pop()


def _type_of_prompt(problem: Problem) -> pa.DataType:
    if isinstance(problem.prompt, str):
        return QUESTION
    has_tools = any(message.tool_calls or message.name for message in problem.prompt)
    return TURNS if has_tools else pa.list_(MESSAGE)


def problem_schema(trace_fields: Mapping[str, pa.DataType], prompt: pa.DataType = QUESTION) -> pa.Schema:
    """Schema of luffy's layout."""
    trace = pa.struct([("text", pa.string()), *trace_fields.items(), ("teacher", pa.string())])
    columns = [("id", pa.string()), ("prompt", prompt), ("answer", pa.string())]
    return pa.schema([*columns, ("traces", pa.list_(trace)), ("source", pa.string())])


def column_types(rows: Callable[[], Iterable[Mapping[str, Any]]]) -> dict[str, pa.DataType | None]:
    """Parquet type of each column, in order of appearance; None if no type holds all its values. ``rows()`` is called
    twice."""
    found: dict[str, pa.DataType | None] = {}
    for some in _groups(rows()):
        for name in dict.fromkeys(name for row in some for name in row):
            found[name] = _type_of_all(found.get(name, pa.null()), [row.get(name) for row in some])
    found = {name: kind if kind is not None and _can_be_written(kind) else None for name, kind in found.items()}
    for some in _groups(rows()):  # what fits in its group may not fit in the type of all, e.g. large whole numbers
        for name, kind in found.items():
            if kind is not None and not _holds(kind, [row.get(name) for row in some]):
                found[name] = None
    return found


def _groups(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    rest = iter(rows)
    while some := list(islice(rest, ROWS_PER_GROUP)):
        yield some


def _holds(kind: pa.DataType, values: Sequence[Any]) -> bool:
    try:
        pa.array(values, kind)
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        return False
    return True


def _type_of_all(known: pa.DataType | None, values: Sequence[Any]) -> pa.DataType | None:
    if known is None:
        return None
    try:
        kinds = [pa.schema([("values", kind)]) for kind in (known, pa.array(values).type)]
        return pa.unify_schemas(kinds, promote_options="permissive").field("values").type
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        return None


def _can_be_written(kind: pa.DataType) -> bool:
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([("values", kind)])).close()
    except pa.ArrowNotImplementedError:  # an object that is empty in all rows
        return False
    return True


@contextmanager
def problem_writer(path: Path, schema: pa.Schema) -> Iterator[Callable[[Record], None]]:
    """Gives a function that adds a row to a Parquet file, a row group at a time; use it inside ``whole_file``."""
    rows: list[Record] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            rows.clear()

        def add(row: Record) -> None:
            rows.append(row)
            if len(rows) == ROWS_PER_GROUP:
                flush()

        yield add
        if rows:
            flush()
