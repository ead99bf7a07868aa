"""Journal of finished work, from which a killed command resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from luffy.data.sources import shown
from luffy.errors import DataError, UserError
from luffy.files import json_object, try_lock

Record = dict[str, Any]

MAY_CHANGE = {"endpoint"}  # where the work is done, not what it is


class Journal:
    """Append-only JSONL file of finished work; the first line holds the settings of the work.

    Opening it removes a line torn by a kill, and refuses other settings or a second process.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], **kinds: type) -> None:
        """``kinds``: types of a record's values, as for ``json_object``."""
        self.path, self._kinds = path, kinds
        self._file = path.open("a+b")
        try:
            if not try_lock(self._file):
                raise UserError(f"{path}: another process is at work on it; wait for it, or choose another --out")
            self._file.seek(0)
            self._ends = list(accumulate(len(line) for line in self._file if line.endswith(b"\n")))
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
        remedy = "cut off the file before that line to resume from there, or delete it to start again"
        return json_object(line, f"{self.path}:{index + 2}", remedy, **self._kinds)

    def append(self, records: Sequence[Record]) -> None:
        """Write records to the disk."""
        if records:
            self._write(records)

    def _write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            self._ends.append(self._file.tell())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check(self, settings: Mapping[str, Any]) -> None:
        self._file.seek(0)
        remedy = "it is no journal of earlier work; move it away or choose another --out"
        before = json_object(self._file.readline(), f"{self.path}:1", remedy, settings=dict)["settings"]
        now = json.loads(json.dumps(dict(settings)))
        for name in sorted((before.keys() | now.keys()) - MAY_CHANGE):
            if before.get(name) != now.get(name):
                raise DataError(
                    f"{self.path}: was made with {name}={shown(before.get(name))}, now it is {shown(now.get(name))}; "
                    "repeat the old setting, choose another --out, or delete the file to start again"
                )


def whole_text(text: str) -> str:
    """``text`` with a replacement character for half a surrogate pair, which no file can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
