"""Files that survive a kill: a journal to resume from, and outputs that are whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from luffy.data.sources import shown
from luffy.errors import DataError, UserError
from luffy.files import json_object, try_lock

Record = dict[str, Any]

ROWS_PER_GROUP = 512
MAY_CHANGE = {"endpoint"}  # where the work is done, not what it is
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


class Journal:
    """An append-only JSONL of finished work. Its first line holds the settings the work was done under.

    A line torn by a kill is cut off when the journal is opened again; other settings, or a second process at
    work on the same file, are refused.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], **kinds: type) -> None:
        """``kinds`` of a record's values, as ``json_object`` takes them."""
        self.path, self._kinds = path, kinds
        self._file = _opened(path)
        try:
            self._lock()
            self._ends = _line_ends(self._file)
            if self._ends:
                self._check(settings)
            self._file.truncate(self._ends[-1] if self._ends else 0)
            self._file.seek(0, os.SEEK_END)
            if not self._ends:
                self._write([{"settings": dict(settings)}])
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        """Number of finished records."""
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Record:
        with self.path.open("rb") as file:
            file.seek(self._ends[index])
            return self._parsed(file.readline(), index)

    def __iter__(self) -> Iterator[Record]:
        with self.path.open("rb") as file:
            file.seek(self._ends[0])
            for index in range(len(self)):
                yield self._parsed(file.readline(), index)

    def _parsed(self, line: bytes, index: int) -> Record:
        remedy = "cut off the file before that line to go on from there, or delete it to start again"
        return json_object(line, f"{self.path}:{index + 2}", remedy, **self._kinds)

    def append(self, records: Sequence[Record]) -> None:
        """On disk when this returns."""
        if records:
            self._write(records)

    def _write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            self._ends.append(self._file.tell())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        if not try_lock(self._file):
            what = "another process is at work on it; wait for it, or choose another --out"
            raise UserError(f"{self.path}: {what}")

    def _check(self, settings: Mapping[str, Any]) -> None:
        self._file.seek(0)
        remedy = "it is no record of earlier work; move it away or choose another --out"
        before = json_object(self._file.readline(), f"{self.path}:1", remedy, settings=dict)["settings"]
        now = json.loads(json.dumps(dict(settings)))
        for name in sorted((before.keys() | now.keys()) - MAY_CHANGE):
            if before.get(name) != now.get(name):
                raise DataError(
                    f"{self.path}: was made with {name}={shown(before.get(name))}, now it is {shown(now.get(name))}; "
                    "repeat the old setting, choose another --out, or delete the file to start again"
                )


def _opened(path: Path) -> Any:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    return os.fdopen(descriptor, "r+b")


def _line_ends(file: Any) -> list[int]:
    """Where each complete line ends."""
    ends, position = [], 0
    file.seek(0)
    for line in file:
        position += len(line)
        if line.endswith(b"\n"):
            ends.append(position)
    return ends


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
