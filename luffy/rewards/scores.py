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
from luffy.rewards.kinds import Answered
from luffy.rewards.verifier import Verifier
from luffy.types import Message, Problem, opens_thought

# Few enough to keep memory flat and the bar moving, many enough that one slow row seldom idles a worker.
_ROWS_AT_ONCE = 128
_COPIED = ("id", "problem")
_READ = (*_COPIED, "prompt", "answer", "response")


@dataclass(frozen=True)
class ScoreSummary:
    """Summary of a scored file: ``counts`` maps each status to its number of rows."""

    rows: int
    mean_score: float
    counts: Counter[str]
    seconds: float

    def __str__(self) -> str:
        statuses = ", ".join(f"{status} {count:,}" for status, count in sorted(self.counts.items()))
        return f"{self.rows:,} rows, mean score {self.mean_score:.4f}, {statuses}; {self.seconds:.1f} s"


def score_file(
    rows_path: str | Path, out_path: str | Path | None, verifier: Verifier, progress: bool = True
) -> ScoreSummary:
    """Score each row ``{"answer", "response"}`` and write one line ``{"score", "status"}`` for it, in order. Rewards
    may ask for further columns; a ``prompt`` that ends with ``<think>`` opened a thought.

    ``-`` is standard input. All rows are checked before the first is scored. A file appears only when it is
    complete; without ``out_path`` the lines go to standard output as they come.
    """
    name, lines = str(rows_path), None
    if name == "-":  # kept in memory, because rows are read twice
        name, lines = "standard input", sys.stdin.buffer.readlines()
    target = nullcontext(sys.stdout) if out_path is None else complete_or_nothing(Path(out_path))
    started = time.monotonic()
    total = sum(1 for _ in read_rows(name, lines))
    counts: Counter[str] = Counter()
    sum_of_scores = 0.0
    bar = progress_bar("verified rows", total) if progress else nullcontext(lambda count: None)
    with target as out, bar as advance:
        rows = read_rows(name, lines)
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            scores = verifier.score([answered for _, answered in batch])
            for (copied, _), score in zip(batch, scores, strict=True):
                out.write(json.dumps({**copied, "score": score.value, "status": score.status}) + "\n")
                sum_of_scores += score.value
                counts[score.status] += 1
            advance(len(batch))
    return ScoreSummary(total, sum_of_scores / total if total else 0.0, counts, time.monotonic() - started)


def read_rows(name: str, lines: Sequence[bytes] | None = None) -> Iterator[tuple[dict[str, Any], Answered]]:
    """Rows of ``lines``, or of the file ``name``: the columns to copy, and the response to score. Blank lines are
    skipped."""
    if lines is None and not Path(name).is_file():
        raise DataError(f"{name}: no such file")
    with open(name, "rb") if lines is None else nullcontext(lines) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _row(f"{name}:{number}", number, line)


def _row(where: str, number: int, line: bytes) -> tuple[dict[str, Any], Answered]:
    row = json_object(line, where, "fix the line")
    answer, response = (_text(where, row, column) for column in ("answer", "response"))
    copied = {key: row[key] for key in _COPIED if key in row}
    prompt = _prompt(where, row.get("prompt", row.get("problem", "")))
    meta = {key: row[key] for key in row if key not in _READ}
    problem = Problem(str(copied.get("id", number)), prompt, answer, meta=meta)
    return copied, Answered(problem, response, in_thought=isinstance(prompt, str) and opens_thought(prompt))


def _prompt(where: str, value: Any) -> str | tuple[Message, ...]:
    if not isinstance(value, list):
        return str(value)
    try:
        return tuple(Message(str(turn["role"]), str(turn["content"])) for turn in value)
    except (TypeError, KeyError) as error:
        message = f"column 'prompt' must be text or chat messages with 'role' and 'content', found {str(value)[:80]}"
        raise DataError(f"{where}: {message}") from error


def _text(where: str, row: dict[str, Any], column: str) -> str:
    if column not in row:
        found = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where}: column {column!r} is missing (found: {found})")
    value = row[column]
    if column == "answer" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} must be a string, found {type(value).__name__} {str(value)[:80]}; "
            "put it in quotes"
        )
    if column == "answer" and not value.strip():
        raise DataError(f"{where}: column 'answer' is empty")
    return value
