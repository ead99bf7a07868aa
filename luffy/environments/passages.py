"""Passages of a user's JSONL file, found by the words of a query (BM25)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.errors import DataError, needing

WORD = re.compile(r"\w+")


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
