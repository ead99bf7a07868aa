"""A row as its reader sees it: values by column, options, and errors that name file, row, column and value."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luffy.data.sources import FIX_OR_SKIP, RowError, shown
from luffy.errors import ConfigError
from luffy.types import Problem

ROW_KEY = "__row__"
"""Key of ``Problem.meta`` that holds ``file:row``, so that later errors can name the row."""
ABSENT = object()
LONGEST_NAMES = 300
LOWEST = -sys.float_info.max  # an integer may be lower, and no float holds it


@dataclass(frozen=True)
class ReadOptions:
    require_answer: bool = True
    require_traces: bool = False
    strip_calculator: bool = True
    columns: Mapping[str, str] = field(default_factory=dict)
    turns: str = "last"


@dataclass(frozen=True)
class RowView:
    """One row, its name for messages, and the options of its reader."""

    values: Mapping[str, Any]
    where: str
    default_id: str
    options: ReadOptions = ReadOptions()

    def get(self, column: str) -> Any:
        """Value at a column or dotted path; None if it is absent."""
        value = lookup(self.values, column)
        return None if value is ABSENT else value

    def text(self, column: str) -> str | None:
        """Text of an optional column; None if it is absent or blank."""
        value = none_if_blank(self.get(column))
        if value is not None and not isinstance(value, str):
            raise self.unexpected(column, "a string", value)
        return value

    def fault(self, column: str, what: str, advice: str = FIX_OR_SKIP) -> RowError:
        return RowError(self.where, f"column {column!r}: {what}", column, advice)

    def unexpected(self, column: str, expected: str, value: Any) -> RowError:
        if value is None and lookup(self.values, column) is ABSENT:
            return self.fault(column, f"expected {expected}, but the row has only {column_names(self.values)}")
        return self.fault(column, f"expected {expected}, found {shown(value)}")


def columns_of(problem: Problem) -> dict[str, Any]:
    """The columns of the problem's row that luffy itself does not use."""
    return {name: value for name, value in problem.meta.items() if name != ROW_KEY}


def column_names(row: Mapping[str, Any]) -> str:
    """Names of the row's columns for a message, on one line and shortened."""
    names = " ".join(", ".join(row).split())
    return (names if len(names) <= LONGEST_NAMES else f"{names[:LONGEST_NAMES]}...") or "(none)"


def lookup(values: Mapping[str, Any], column: str) -> Any:
    """Value at ``column``, which may be a dotted path into nested columns; ABSENT if there is none."""
    if column in values:
        return values[column]
    head, dot, rest = column.partition(".")
    inner = values.get(head) if dot else None
    return lookup(inner, rest) if isinstance(inner, Mapping) else ABSENT


def log_prob_fault(values: Iterable[Any]) -> str | None:
    """Description of the first value that is no log-probability, or None."""
    for place, value in enumerate(values):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not LOWEST <= value <= 0:
            return f"expected finite log-probs of at most 0, found {shown(value)} at position {place}"
    return None


def none_if_blank(value: Any) -> Any:
    """The value, or None if it is a blank text: flat files write an absent trace so."""
    return None if is_blank(value) else value


def is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def one_of(knob: str, value: str, known: Sequence[str]) -> str:
    """``value``, or a ConfigError if it is none of the known ones."""
    if value not in known:
        raise ConfigError(f"{knob}={value!r} is unknown; known: {', '.join(known)}")
    return value
