"""Environments that need no code of a user's own: ``environment: {name: calculator}``."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.environments.arithmetic import evaluate, shown
from luffy.environments.kinds import environment
from luffy.environments.sandbox import make_sandbox
from luffy.errors import ConfigError, DataError, needing
from luffy.schema import knob

WORD = re.compile(r"\w+")


@environment("chain")
class Chain:
    """The quickstart's: sums of several small numbers, which a tiny model cannot do in its head."""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b


@environment("calculator")
class Calculator:
    """Exact arithmetic."""

    def calculate(self, expression: str) -> str:
        """Compute the exact value of an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses, e.g. (12 + 3) * 4 / 7.
        """
        return shown(evaluate(expression))


@dataclass(frozen=True)
class PythonSettings:
    """Settings of the environment ``python``."""

    time_s: float = knob(5.0, "seconds that one piece of code may take", gt=0)
    memory_mb: int = knob(512, "address space of its process", ge=32)
    allow: tuple[str, ...] = knob((), "limits to go without where the system has none: network, memory")

    def check(self, where: str) -> None:
        """The limits that may be missing have names."""
        unknown = [name for name in self.allow if name not in ("network", "memory")]
        if unknown:
            raise ConfigError(f"'{where}.allow' may name network and memory; got {unknown[0]!r}")


@environment("python", settings=PythonSettings)
class PythonTool:
    """Python code in a sandbox, each piece in a process of its own."""

    def __init__(self, settings: PythonSettings) -> None:
        self._sandbox = make_sandbox(settings.time_s, settings.memory_mb, settings.allow)

    def run(self, code: str) -> str:
        """Run Python code and see what it prints. Nothing is kept from one call to the next.

        Args:
            code: The code; the value of its last line is shown too.
        """
        return self._sandbox.run(code).text


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the environment ``search``."""

    file: str = knob("", "a JSONL file with the passages", required=True)
    column: str = knob("text", "its column with the text")
    top: int = knob(3, "passages in an answer", ge=1)


@environment("search", settings=SearchSettings)
class Search:
    """The best passages of a user's own file for a query."""

    def __init__(self, settings: SearchSettings) -> None:
        self._passages, self._top = read_passages(settings.file, settings.column), settings.top

    def search(self, query: str) -> str:
        """Search for passages.

        Args:
            query: The words to look for.
        """
        found = self._passages.find(query, self._top)
        return "\n".join(f"[{number}] {text}" for number, text in enumerate(found, start=1)) or "nothing found"


# ---- passages, found by the words of a query (BM25)


@dataclass(frozen=True)
class Passages:
    """The texts of a file and an index of their words."""

    texts: tuple[str, ...]
    words: tuple[frozenset[str], ...]
    index: Any

    def find(self, query: str, top: int) -> list[str]:
        """At most ``top`` passages that have a word of the query, the best first; equal ones in the file's order."""
        asked = words_of(query)
        values = self.index.get_scores(asked)
        having = [place for place, words in enumerate(self.words) if not words.isdisjoint(asked)]
        return [self.texts[place] for place in sorted(having, key=lambda place: (-values[place], place))[:top]]


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


@functools.cache
def read_passages(file: str, column: str) -> Passages:
    """The passages of a file; read once for all episodes."""
    with needing("environment search needs rank-bm25", "search"):
        from rank_bm25 import BM25Plus
    texts = tuple(_texts(Path(file), column))
    words = [words_of(text) for text in texts]
    if not any(words):
        raise DataError(f"{file}: no text to search in column {column!r}")
    return Passages(texts, tuple(map(frozenset, words)), BM25Plus(words))


def _texts(file: Path, column: str) -> Iterator[str]:
    if not file.is_file():
        raise DataError(f"{str(file)!r}: no such file; set arguments: {{file: passages.jsonl}}")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _text(line, column, f"{file}, line {number}")


def _text(line: bytes, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: no valid JSON") from None
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where}: no text in column {column!r}; found: {found}")
    return str(row[column])
