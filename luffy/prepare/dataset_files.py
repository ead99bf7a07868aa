"""Problems in a Parquet file: its schema, the types of further columns, and the writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from luffy.prepare.journal import Record

ROWS_PER_GROUP = 512
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def problem_schema(trace_fields: Mapping[str, pa.DataType], chats: bool = False) -> pa.Schema:
    """luffy's own layout. A prompt is one type in the whole file: questions, or chats."""
    trace = pa.struct([("text", pa.string()), *trace_fields.items(), ("teacher", pa.string())])
    prompt = pa.list_(MESSAGE) if chats else pa.string()
    columns = [("id", pa.string()), ("prompt", prompt), ("answer", pa.string())]
    return pa.schema([*columns, ("traces", pa.list_(trace)), ("source", pa.string())])


def column_types(rows: Callable[[], Iterable[Mapping[str, Any]]]) -> dict[str, pa.DataType | None]:
    """What each column of rows needs in a Parquet file, in order of appearance; None where no one type holds all its
    values. ``rows()`` goes through the rows anew."""
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


class ProblemWriter:
    """Rows to a parquet file, a row group at a time. Use inside ``whole_file``."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._rows: list[Record] = []

    def __enter__(self) -> ProblemWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def add(self, row: Record) -> None:
        self._rows.append(row)
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []
