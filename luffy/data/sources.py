"""Random access to the raw rows of a dataset; memory does not grow with the data.

JSON and CSV files keep only byte offsets; Arrow files are memory-mapped; a Parquet file small enough is decoded
once, a larger one is copied once to an Arrow file on disk, because shuffled access to Parquet would decode a row group
per row. An unreadable row is a ``RowError``, so that the caller may skip it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import mmap
import os
import re
import sys
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from luffy.data.data_files import CSV_SUFFIX, DATA_SUFFIXES, JSON_SUFFIXES, files_of
from luffy.errors import DataError
from luffy.files import cache_folder, whole_file

FIX_OR_SKIP = "fix the row or set data.bad_rows=skip"
BOM = b"\xef\xbb\xbf"
IN_MEMORY_BYTES = 64 << 20
"""A Parquet file up to this size (as its own metadata says, uncompressed) is decoded into memory."""
ROWS_PER_BATCH = 64
# A string, or a character that opens, closes or separates. An unclosed string matches its opening quote alone.
JSON_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},"]', re.DOTALL)

Row = dict[str, Any]


class RowError(DataError):
    """One row is unusable. Skipped rows are counted by ``kind``, usually the column."""

    def __init__(self, where: str, fault: str, kind: str, advice: str = FIX_OR_SKIP) -> None:
        super().__init__(f"{where}: {fault}; {advice}")
        self.kind = kind


class JsonFloat(float):
    """A float that remembers how the file wrote it, because a gold answer ``0.50`` must stay ``0.50``."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> JsonFloat:
        number = super().__new__(cls, text)
        number.text = str(text)
        return number


class RowSource(ABC):
    """Rows by index. ``scan`` gives unreadable rows as values; ``__iter__`` and indexing raise them."""

    path: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def scan(self) -> Iterator[Row | RowError]:
        """All rows in order, in one streaming pass."""

    @abstractmethod
    def _row(self, index: int) -> Row: ...

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.path}")
        return self._row(index)

    def __iter__(self) -> Iterator[Row]:
        for row in self.scan():
            if isinstance(row, RowError):
                raise row
            yield row

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the file's bytes."""
        return _digest_of(self.path)

    def number(self, index: int) -> int:
        """Row number in its file, from 1, as an editor shows it."""
        return index + 1

    def name(self, index: int) -> str:
        """``file:row`` for messages."""
        return f"{self.path}:{self.number(index)}"

    def default_id(self, index: int) -> str:
        """Id of a row without one."""
        return f"{Path(self.path).stem}:{self.number(index)}"

    def part(self, index: int) -> int:
        """Index of the row's file among several; columns may differ between files."""
        return 0


class TextRows(RowSource):
    """Rows that are spans of a text file; here JSON objects, one per line. Blank lines are ignored."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._starts, self._ends, self._numbers = array("q"), array("q"), array("q")
        with open(path, "rb") as file:
            self._state = _file_state(file)
            self.fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)
            for start, end, number in self._spans(file):
                self._starts.append(start)
                self._ends.append(end)
                self._numbers.append(number)
        if not self._numbers:
            raise DataError(f"{path}: the file is empty; give a file with data")

    def _spans(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        """First byte, end and number of each row, from the file's position on."""
        position = file.tell()
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield position, position + len(line), number
            position += len(line)

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, index: int) -> int:
        return self._numbers[index]

    def scan(self) -> Iterator[Row | RowError]:
        with open(self.path, "rb") as file:
            for index in range(len(self)):
                try:
                    row: Row | RowError = self._parse(index, self._text(file, index))
                except RowError as error:
                    row = error
                yield row

    def _row(self, index: int) -> Row:
        # A file opened per row, not held: safe across threads, forks and pickling.
        with open(self.path, "rb") as file:
            return self._parse(index, self._text(file, index))

    def _text(self, file: BinaryIO, index: int) -> bytes:
        self._check_unchanged(file)
        file.seek(self._starts[index])
        return file.read(self._ends[index] - self._starts[index])

    def _check_unchanged(self, file: BinaryIO) -> None:
        """Stop if the file's bytes changed; a file that was only touched or copied again is hashed once more."""
        state = _file_state(file)
        if state == self._state:
            return
        if _digest_of(self.path) != self.fingerprint:
            raise DataError(f"{self.path}: the file changed while it was in use; start again")
        self._state = state

    def _parse(self, index: int, text: bytes) -> Row:
        try:
            row = json.loads(text.decode("utf-8"), parse_float=JsonFloat)
        except UnicodeDecodeError as error:
            raise RowError(self.name(index), f"not UTF-8 text ({error.reason})", "json") from error
        except (ValueError, RecursionError) as error:
            reason = str(error).partition(": line")[0]
            raise RowError(self.name(index), f"not valid JSON ({reason}), found {shown(text)}", "json") from error
        if not isinstance(row, dict):
            raise RowError(self.name(index), f"expected a JSON object, found {shown(row)}", "json")
        if b"\\ud" in text.lower() and _has_lone_surrogate(row):
            raise RowError(self.name(index), "half of a surrogate pair (\\ud...) is no text", "json")
        return row


class JsonList(TextRows):
    """One JSON list of objects. A row's number is its index in the list: a list may be one long line."""

    def _spans(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        """Spans found from strings, brackets and commas alone, without parsing: an element may be invalid JSON."""
        depth, begin, number = 0, 0, 1
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for token in JSON_TOKEN.finditer(data, file.tell()):
                sign = token.group()[:1]
                if sign == b'"' and token.end() - token.start() == 1:
                    raise self._no_list("a string in it is not closed")
                if sign in b"[{":
                    depth += 1
                    begin = token.end() if depth == 1 else begin
                elif sign in b"]}":
                    depth -= 1
                if depth == 0 and sign != b'"':
                    break
                if sign == b"," and depth == 1:
                    yield begin, token.start(), number
                    begin, number = token.end(), number + 1
            if depth or sign != b"]":
                raise self._no_list("it is not closed")
            if number > 1 or data[begin : token.start()].strip():
                yield begin, token.start(), number
            if data[token.end() :].strip():
                raise self._no_list("more follows after its closing bracket")

    def _no_list(self, why: str) -> DataError:
        return DataError(f"{self.path}: begins with a JSON list, but {why}; give one list or one object per line")


class CsvRows(TextRows):
    """Comma-separated values under a line of column names. All values are texts; an empty one is null."""

    def _spans(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        csv.field_size_limit(sys.maxsize)  # a trace may be long
        self._columns: list[str] = []
        for start, end, number in _csv_records(file):
            if self._columns:
                yield start, end, number
                continue
            here = file.tell()
            file.seek(start)
            self._columns = self._header(file.read(end - start))
            file.seek(here)

    def _header(self, text: bytes) -> list[str]:
        try:
            names = self._values(text)
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{self.path}: its first line is no list of column names ({error}); fix it") from error
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise DataError(f"{self.path}: the first line must name every column once, found {shown(names)}; fix it")
        return names

    def _values(self, text: bytes) -> list[str]:
        return next(csv.reader([text.decode("utf-8")], strict=True))

    def _parse(self, index: int, text: bytes) -> Row:
        try:
            values = self._values(text)
        except UnicodeDecodeError as error:
            raise RowError(self.name(index), f"not UTF-8 text ({error.reason})", "csv") from error
        except csv.Error as error:
            raise RowError(self.name(index), f"not valid CSV ({error}), found {shown(text)}", "csv") from error
        if len(values) != len(self._columns):
            what = f"expected {len(self._columns)} values, one per column, found {len(values)}"
            raise RowError(self.name(index), what, "csv")
        return {name: value or None for name, value in zip(self._columns, values, strict=True)}


class ArrowRows(RowSource):
    """Rows of record batches that lie in a memory map, or in memory when they are few."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not len(self):
            raise DataError(f"{path}: the file has no rows; give a file with data")

    @cached_property
    def _batches(self) -> list[pa.RecordBatch]:
        return _mapped_batches(self.path)

    @cached_property
    def _ends(self) -> array[int]:
        return array("q", accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def scan(self) -> Iterator[Row | RowError]:
        for batch in self._batches:
            for start in range(0, batch.num_rows, ROWS_PER_BATCH):
                yield from self._decode(batch.slice(start, ROWS_PER_BATCH))

    def _decode(self, batch: pa.RecordBatch) -> list[Row]:
        try:
            rows: list[Row] = batch.to_pylist()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: a text is not UTF-8 ({error.reason}); the file is damaged") from error
        _shorten_floats(rows, batch.schema)
        return rows

    def _row(self, index: int) -> Row:
        which = bisect_right(self._ends, index)
        before = self._ends[which - 1] if which else 0
        return self._decode(self._batches[which].slice(index - before, 1))[0]

    def __getstate__(self) -> dict[str, Any]:
        """A worker process maps the file again instead of receiving its bytes."""
        return {key: value for key, value in vars(self).items() if key != "_batches"}


class ParquetRows(ArrowRows):
    """A Parquet file: scanned as a stream, opened for random access only at the first index."""

    def __init__(self, path: str) -> None:
        with _as_data_error(path, "a Parquet file"):
            metadata = pq.read_metadata(path)
        self._rows = metadata.num_rows
        self._bytes = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        super().__init__(path)

    def __len__(self) -> int:
        return int(self._rows)

    def scan(self) -> Iterator[Row | RowError]:
        for batch in self._stream():
            yield from self._decode(batch)

    def _stream(self) -> Iterator[pa.RecordBatch]:
        # Buffered and without prefetch: a file that is one huge row group still passes page by page.
        with (
            _as_data_error(self.path, "a whole Parquet file"),
            pq.ParquetFile(self.path, buffer_size=1 << 16, pre_buffer=False) as file,
        ):
            yield from file.iter_batches(batch_size=ROWS_PER_BATCH)

    @cached_property
    def _batches(self) -> list[pa.RecordBatch]:
        return list(self._stream()) if self._bytes <= IN_MEMORY_BYTES else _mapped_batches(self._arrow_copy())

    def _arrow_copy(self) -> str:
        """An uncompressed copy in the cache folder, named by the content, so that later runs find it."""
        folder = cache_folder() / "arrow"
        target = folder / f"{self.fingerprint}.arrow"
        if target.exists():
            return str(target)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write_arrow(target)
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot write its random-access copy {target} ({error.strerror or error}); "
                "set LUFFY_CACHE to a writable folder with room"
            ) from error
        return str(target)

    def _write_arrow(self, target: Path) -> None:
        schema = pq.read_schema(self.path)
        with (
            whole_file(target) as temporary,
            temporary.open("wb") as file,
            pa.ipc.new_stream(file, schema) as writer,
        ):
            for batch in self._stream():
                writer.write_batch(batch)


class ConcatSource(RowSource):
    """Several files one after the other."""

    def __init__(self, parts: Sequence[RowSource]) -> None:
        self.parts = list(parts)
        self.path = ", ".join(part.path for part in parts)
        self._ends = array("q", accumulate(len(part) for part in parts))
        stems = [Path(part.path).stem for part in parts]
        self._labels = stems if len(set(stems)) == len(stems) else [str(Path(p.path).with_suffix("")) for p in parts]

    def __len__(self) -> int:
        return self._ends[-1]

    def part(self, index: int) -> int:
        return bisect_right(self._ends, index)

    def _place(self, index: int) -> tuple[RowSource, int]:
        which = self.part(index)
        return self.parts[which], index - (self._ends[which - 1] if which else 0)

    def scan(self) -> Iterator[Row | RowError]:
        for part in self.parts:
            yield from part.scan()

    def _row(self, index: int) -> Row:
        part, inner = self._place(index)
        return part[inner]

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256("".join(part.fingerprint for part in self.parts).encode()).hexdigest()

    def number(self, index: int) -> int:
        part, inner = self._place(index)
        return part.number(inner)

    def name(self, index: int) -> str:
        part, inner = self._place(index)
        return part.name(inner)

    def default_id(self, index: int) -> str:
        return f"{self._labels[self.part(index)]}:{self.number(index)}"


def open_source(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], split: str = "train") -> RowSource:
    """Rows of a file, a folder, a hub dataset (``org/name`` or ``org/name/folder``), or several of these."""
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise DataError("no data path was given; name a file, a folder or a hub dataset")
    files = [file for one in paths for file in files_of(os.fspath(one), split)]
    sources = [_open_file(file) for file in files]
    return sources[0] if len(sources) == 1 else ConcatSource(sources)


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _csv_records(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """First byte, end and first line of each record from here on, valid or not; a quoted value may have line breaks."""
    reader = csv.reader((line.decode("latin-1") for line in iter(file.readline, b"")), strict=True)
    while True:
        start, number = file.tell(), reader.line_num + 1
        try:
            if next(reader) == []:  # a blank line
                continue
        except StopIteration:
            return
        except csv.Error:
            if file.tell() == start:
                return
        yield start, file.tell(), number


def _file_state(file: BinaryIO) -> tuple[int, int, int]:
    """Inode, size and time of the last change."""
    now = os.fstat(file.fileno())
    return now.st_ino, now.st_size, now.st_mtime_ns


def shown(value: object, width: int = 60) -> str:
    """Value for an error message, on one line and short."""
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _has_lone_surrogate(row: Row) -> bool:
    """Whether a text has half a surrogate pair, which JSON can escape and no tokenizer can read."""
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _open_file(path: str) -> RowSource:
    suffix = Path(path).suffix.lower()
    if suffix not in DATA_SUFFIXES:
        raise DataError(f"{path}: unknown file type {suffix!r}; give one of {', '.join(DATA_SUFFIXES)}")
    if os.path.getsize(path) == 0:
        raise DataError(f"{path}: the file is empty; give a file with data")
    if suffix in JSON_SUFFIXES:
        return JsonList(path) if _begins_a_list(path) else TextRows(path)
    if suffix == CSV_SUFFIX:
        return CsvRows(path)
    return ParquetRows(path) if suffix == ".parquet" else ArrowRows(path)


def _begins_a_list(path: str) -> bool:
    """Whether the first character other than white space is a bracket."""
    with open(path, "rb") as file:
        file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)
        text = b""
        while (block := file.read(1 << 16)) and not (text := block.strip()):
            pass
    return text.startswith(b"[")


def _shorten_floats(rows: Sequence[Row], fields: Iterable[pa.Field]) -> None:
    """Turn floats below 64 bits into their shortest decimals: 0.1, not 0.10000000149011612. Lists, which are log-probs,
    stay as they are."""
    for field in fields:
        name, kind = field.name, field.type
        if pa.types.is_struct(kind):
            _shorten_floats([row[name] for row in rows if row[name] is not None], kind)
        elif pa.types.is_float32(kind) or pa.types.is_float16(kind):
            narrow = kind.to_pandas_dtype()
            for row in rows:
                row[name] = None if row[name] is None else float(str(narrow(row[name])))


@contextmanager
def _as_data_error(path: str, kind: str) -> Iterator[None]:
    """Raise Arrow's errors for damaged bytes as a ``DataError`` of one line."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: not {kind} ({reason}); check the file") from error


def _mapped_batches(path: str) -> list[pa.RecordBatch]:
    """Batches that point into the memory map, each checked because Arrow trusts the offsets in the file."""
    with _as_data_error(path, "an Arrow file"):
        batches = _read_batches(pa.memory_map(path))
        for batch in batches:
            batch.validate(full=True)
    return batches


def _read_batches(mapped: pa.MemoryMappedFile) -> list[pa.RecordBatch]:
    """Batches of the stream format, which ``datasets`` writes, or of the file format."""
    try:
        return list(pa.ipc.open_stream(mapped))
    except pa.ArrowInvalid:
        mapped.seek(0)
    reader = pa.ipc.open_file(mapped)
    return [reader.get_batch(which) for which in range(reader.num_record_batches)]
