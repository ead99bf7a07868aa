"""Hints that a row of the data gives, level by level."""

from __future__ import annotations

from luffy.errors import DataError
from luffy.types import Problem

COLUMN = "hints"


def hints_of(problem: Problem) -> tuple[str, ...]:
    """The column ``hints`` of the problem's row, from the least to the most telling: a list of texts, or one text."""
    given = problem.meta.get(COLUMN)
    hints = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(hints, list | tuple) or not all(isinstance(hint, str) and hint.strip() for hint in hints):
        raise DataError(
            f"problem {problem.id!r}: column {COLUMN!r}: expected a list of texts, from the least to the most telling, "
            f"found {str(given)[:60]!r}; fix the row or rename the column"
        )
    return tuple(hints)
