"""``luffy verify``: score the rows of a JSONL file from the shell."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from luffy.errors import DataError
from luffy.files import complete_or_nothing, json_object
from luffy.progress import progress as progress_bar
from luffy.rewards.verifier import Verifier
from luffy.types import Message, Problem, opens_thought

# Few enough to keep memory flat and the bar moving, many enough that one slow row seldom idles a worker.
_ROWS_AT_ONCE = 128
_COPIED = ("id", "problem")
_READ = (*_COPIED, "prompt", "answer", "response")


@dataclass(frozen=True)
class ScoreSummary:
    """What was scored: ``counts`` maps each status to its number of rows."""

    rows: int
    mean_score: float
    counts: Counter[str]
    seconds: float

    def __str__(self) -> str:
        statuses = ", ".join(f"{status} {count:,}" for status, count in sorted(self.counts.items()))
        return f"{self.rows:,} rows, mean score {self.mean_score:.4f}, {statuses}; {self.seconds:.1f} s"


@dataclass(frozen=True)
class _Row:
    line: int
    answer: str
    response: str
    copied: dict[str, Any]
    prompt: str | tuple[Message, ...]
    meta: dict[str, Any]

    def problem(self) -> Problem:
        return Problem(str(self.copied.get("id", self.line)), self.prompt, self.answer, meta=self.meta)

    @property
    def in_thought(self) -> bool:
        return isinstance(self.prompt, str) and opens_thought(self.prompt)


def score_file(
    rows_path: str | Path, out_path: str | Path | None, verifier: Verifier, progress: bool = True
) -> ScoreSummary:
    """Score each row ``{"answer", "response"}`` and write one line ``{"score", "status"}`` for it, in order. Further
    columns are for rewards that ask for them; a ``prompt`` that ends with ``<think>`` opened a thought.

    ``-`` is standard input. All rows are checked before the first is scored. A file appears only when it is
    complete; without ``out_path`` the lines go to standard output as they come.
    """
    name, lines = ("standard input", _standard_input()) if str(rows_path) == "-" else (str(rows_path), None)
    target = nullcontext(sys.stdout) if out_path is None else complete_or_nothing(Path(out_path))
    started = time.monotonic()
    total = sum(1 for _ in read_rows(name, lines))
    counts: Counter[str] = Counter()
    sum_of_scores = 0.0
    bar = progress_bar("verified rows", total) if progress else nullcontext(lambda count: None)
    with target as out, bar as advance:
        rows = read_rows(name, lines)
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            scores = verifier.score([(row.problem(), row.response, None, row.in_thought) for row in batch])
            for row, score in zip(batch, scores, strict=True):
                out.write(json.dumps({**row.copied, "score": score.value, "status": score.status}) + "\n")
                sum_of_scores += score.value
                counts[score.status] += 1
            advance(len(batch))
    return ScoreSummary(total, sum_of_scores / total if total else 0.0, counts, time.monotonic() - started)


def _standard_input() -> list[bytes]:
    """In memory: rows are read twice, once to check them and once to score them."""
    return sys.stdin.buffer.readlines()


def read_rows(name: str, lines: Sequence[bytes] | None = None) -> Iterator[_Row]:
    """Rows of ``lines``, or of the file ``name``, streamed; blank lines are skipped."""
    if lines is None and not Path(name).is_file():
        raise DataError(f"{name}: no such file")
    with open(name, "rb") if lines is None else nullcontext(lines) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _row(name, number, line)


def _row(path: str, number: int, line: bytes) -> _Row:
    row = json_object(line, f"{path}:{number}", "fix the line")
    answer, response = (_text(path, number, row, column) for column in ("answer", "response"))
    copied = {key: row[key] for key in _COPIED if key in row}
    prompt = _prompt(path, number, row.get("prompt", row.get("problem", "")))
    return _Row(number, answer, response, copied, prompt, {key: row[key] for key in row if key not in _READ})


def _prompt(path: str, number: int, value: Any) -> str | tuple[Message, ...]:
    if not isinstance(value, list):
        return str(value)
    try:
        return tuple(Message(str(turn["role"]), str(turn["content"])) for turn in value)
    except (TypeError, KeyError) as error:
        message = f"column 'prompt' must be text or chat messages with 'role' and 'content', found {str(value)[:80]}"
        raise DataError(f"{path}:{number}: {message}") from error


def _text(path: str, number: int, row: dict[str, Any], column: str) -> str:
    if column not in row:
        found = ", ".join(map(str, row)) or "none"
        raise DataError(f"{path}:{number}: column {column!r} is missing (found: {found})")
    value = row[column]
    if column == "answer" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{path}:{number}: column {column!r} must be a string, found {type(value).__name__} {str(value)[:80]}; "
            "put it in quotes"
        )
    if column == "answer" and not value.strip():
        raise DataError(f"{path}:{number}: column 'answer' is empty")
    return value
