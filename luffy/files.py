"""Files that are there whole or not at all: written aside, flushed to the disk, then given their name."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from luffy.errors import UserError

UNFINISHED = ".tmp"
LONGEST_LINE = 1 << 28
KINDS = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; it takes the name ``path`` only when everything in it is on disk."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file to write")
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} does not exist; make it first")
    # Not by the process id: those who write to a shared folder may sit on several machines.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield temporary
        flush_path(temporary)
        temporary.replace(path)
        flush_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def complete_or_nothing(path: Path) -> Iterator[TextIO]:
    """A text file that takes its name only when everything in it is on disk."""
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file: the old text or the new one is there at any moment, never a part."""
    with complete_or_nothing(path) as file:
        file.write(text)


def json_value(raw: bytes, where: object, remedy: str) -> Any:
    """What is in a JSON file or a line that may be damaged: a UserError then says where, and what to do."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, thousands of digits, or brackets within brackets
        raise UserError(f"{where}: not JSON ({error}); {remedy}") from None


def as_object(value: Any, where: object, remedy: str, /, **kinds: type) -> dict[str, Any]:
    """``value``, if it is an object that has values of these ``kinds`` under these keys, among others."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: not a JSON object; {remedy}")
    for key, kind in kinds.items():
        if not isinstance(value.get(key), (int, float) if kind is float else kind):
            raise UserError(f"{where}: needs {KINDS[kind]} as '{key}'; {remedy}")
    return value


def json_object(raw: bytes, where: object, remedy: str, /, **kinds: type) -> dict[str, Any]:
    """The JSON object in a file or a line: ``as_object`` of its ``json_value``."""
    return as_object(json_value(raw, where, remedy), where, remedy, **kinds)


def check_regular(path: Path) -> None:
    """A UserError where something else than a file has the name: reading a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise UserError(f"{path}: is {what}, not a file; remove it, or put the file in its place")


def read_file(path: Path) -> bytes:
    """The content of a file that others may have put there."""
    check_regular(path)
    return path.read_bytes()


def leads_away(path: Path) -> bool:
    """Whether a path is a link to a file outside of its folder. A stranger's folder may link to any file of this
    machine, and reports are passed on: what stands in such a file is not quoted."""
    return path.is_symlink() and path.parent.resolve() not in path.resolve().parents


def complete_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(offset, line) from ``start`` on; blank lines, and one that its writer has not ended yet, are left alone."""
    if not path.exists():
        return
    check_regular(path)
    offset = start
    with path.open("rb") as file:
        file.seek(start)
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise UserError(f"{path}: a line of {LONGEST_LINE >> 20} MiB or more; remove it")
            if line.endswith(b"\n") and line.strip():
                yield offset, line
            offset += len(line)


@dataclass(frozen=True)
class LineOf:
    """A line in the words of an error; they are made when one is."""

    path: Path
    line: bytes

    def __str__(self) -> str:
        shown = "" if leads_away(self.path) else f", {self.line[:60].decode('utf-8', 'replace')!r}"
        return f"{self.path}: a line{shown}"


def parse_line(line: bytes, path: Path, **kinds: type) -> dict[str, Any]:
    """The JSON object in a line of a file; ``kinds`` as ``as_object`` takes them."""
    return json_object(line, LineOf(path, line), "mend or remove it", **kinds)


def cache_folder() -> Path:
    """Where copies are kept that can be made again: ``LUFFY_CACHE``, or a folder of the user's cache."""
    return Path(os.environ.get("LUFFY_CACHE") or Path.home() / ".cache" / "luffy")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock file ``path``, and hold it meanwhile."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file for as long as it stays open; False, at once, where another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_unfinished(folder: Path) -> None:
    """What killed writers left in a folder; only for whoever has it to himself."""
    for leftover in folder.glob(f".*{UNFINISHED}"):
        leftover.unlink()


def flush_path(path: Path) -> None:
    """What was written to a file, or renamed in a folder, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
