"""Corrections of Math-Verify: it reads brackets and the order of named values too freely, and does not compare an
inequality with the interval it describes. Runs with Math-Verify in a worker process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_BRACKET = re.compile(r"\\[{}]|[()\[\]]")
_INDEX = re.compile(r"(.+?)_\{?(\d+)\}?")
_OR = re.compile(r"(?<![a-zA-Z])or(?![a-zA-Z])|\\lor(?![a-zA-Z])|\\vee(?![a-zA-Z])")
_COMMA_BEFORE_OR = re.compile(r",\s*(?=(?:\\text\{\s*)?or(?![a-zA-Z]))")
_ANOTHER_JOINER = re.compile(r"[,;]|(?<![a-zA-Z])and(?![a-zA-Z])|\\land(?![a-zA-Z])|\\wedge(?![a-zA-Z])")
_SURELY_AN_INTERVAL = re.compile(r"\\in(?![a-zA-Z])|\\cup(?![a-zA-Z])")


class Solutions(NamedTuple):
    """The numbers that an answer allows. ``name``: of the variable, None if the answer has none."""

    numbers: Any  # a sympy Set
    name: str | None
    is_inequality: bool
    may_be_a_point: bool = False  # (1, 2) is a point or an interval


def brackets_disagree(one: str, other: str) -> bool:
    """Whether one answer is a set in braces and the other a point or an interval in parentheses. ``1, 2`` without any
    agrees with both."""
    return {_enclosed_in(one), _enclosed_in(other)} == {r"\{", "("}


def _enclosed_in(latex: str) -> str | None:
    r"""``(`` or ``\{``, if one pair of them encloses several things and all there is, or all to the right of ``=``."""
    latex = re.split(r"=|\\in(?![a-zA-Z])", latex)[-1].strip()
    brackets = list(_BRACKET.finditer(latex))
    if len(brackets) < 2 or brackets[0].start() != 0 or brackets[-1].end() != len(latex):
        return None
    if (brackets[0][0], brackets[-1][0]) not in ((r"\{", r"\}"), ("(", ")")) or "," not in latex:
        return None
    depth = 0
    for bracket in brackets[:-1]:
        depth += 1 if bracket[0][-1] in "{([" else -1
        if depth == 0:
            return None
    return brackets[0][0]


def names_disagree(gold: Any, guess: Any) -> bool:
    """Whether the gold gives values to different names (``k = 45, n = 2``), and the guess, without names, has them in
    another order. Indices from 1 on (``x_1``, ``x_2``) are no order: they number the roots of an equation."""
    from sympy import Eq, Symbol

    named = _elements(gold)
    if len(named) < 2 or not all(isinstance(e, Eq) and isinstance(e.lhs, Symbol) for e in named):
        return False
    names = [e.lhs.name for e in named]
    values = _elements(guess)
    if len(set(names)) < len(names) or _are_numbered(names) or len(values) != len(named):
        return False
    return not any(isinstance(v, Eq) for v in values) and not all(
        _same(e.rhs, v) for e, v in zip(named, values, strict=True)
    )


def _elements(reading: Any) -> Sequence[Any]:
    """Elements of a list, in the order in which they were written."""
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(reading, FiniteSet):
        return getattr(reading, "_unsorted_args", reading.args)
    if isinstance(reading, Interval):  # so Math-Verify reads (1, 2)
        return (reading.start, reading.end)
    return reading.args if isinstance(reading, Tuple) else ()


def _are_numbered(names: Sequence[str]) -> bool:
    found = [_INDEX.fullmatch(name) for name in names]
    if not all(found):
        return False
    letters, numbers = zip(*(match.groups() for match in found if match), strict=True)
    return len(set(letters)) == 1 and sorted(map(int, numbers)) == list(range(1, len(names) + 1))


def same_solutions(gold: Any, gold_text: str, guess: Any, guess_text: str) -> bool:
    r"""Whether one is an inequality and the other its solutions: ``x \le 2`` and ``(-\infty, 2]``. The inequality must
    be solved for its variable, or repeating the problem would be an answer; the variable's names must not differ; and
    ``(1, 2)``, which may be a point, is not taken for ``1 < x < 2``."""
    one, other = _solutions(gold, gold_text), _solutions(guess, guess_text)
    if one is None or other is None or not (one.is_inequality or other.is_inequality):
        return False
    if one.may_be_a_point or other.may_be_a_point or (one.name and other.name and one.name != other.name):
        return False
    return _same(one.numbers, other.numbers)


def _solutions(reading: Any, text: str) -> Solutions | None:
    from sympy import Eq, FiniteSet, Interval, Set, Symbol, Union

    if isinstance(reading, FiniteSet):
        if not _OR.search(text) or _ANOTHER_JOINER.search(_COMMA_BEFORE_OR.sub("", text)):
            return None
        parts = [_solved(part) for part in reading.args]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len({part.name for part in known}) > 1:
            return None
        return Solutions(Union(*(part.numbers for part in known)), known[0].name, any(p.is_inequality for p in known))
    name = None
    if isinstance(reading, Eq) and isinstance(reading.lhs, Symbol) and isinstance(reading.rhs, Set):
        reading, name = reading.rhs, reading.lhs.name
    if not isinstance(reading, Set):
        return _solved(reading)
    is_bare_pair = isinstance(reading, Interval) and reading.is_open and reading.measure.is_finite
    return Solutions(reading, name, False, bool(is_bare_pair) and not _SURELY_AN_INTERVAL.search(text))


def _solved(relation: Any) -> Solutions | None:
    """The solutions of ``x < 2``, ``1 < x < 2``, ``x = 2``: a variable and numbers. None for all else."""
    from sympy import And, Eq, Intersection, Symbol
    from sympy.core.relational import Relational

    if isinstance(relation, And):
        parts = [_solved(part) for part in relation.args]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len({part.name for part in known}) != 1:
            return None
        return Solutions(Intersection(*(part.numbers for part in known)), known[0].name, True)
    if not isinstance(relation, Relational):
        return None
    variable, number = sorted(relation.args, key=lambda side: not isinstance(side, Symbol))
    if not isinstance(variable, Symbol) or number.free_symbols:
        return None
    return Solutions(relation.as_set(), variable.name, not isinstance(relation, Eq))


def _same(one: Any, other: Any) -> bool:
    from math_verify import verify

    return bool(verify(one, other, timeout_seconds=None, raise_on_error=True))


def all_letters(latex: str) -> str | None:
    r"""The letters of an answer of nothing but letters, such as ``abc`` or ``\text{no}``; else None."""
    bare = re.fullmatch(r"(?:\\(?:text|mathrm|textbf|mathbf|mathit|textit)\{)?([A-Za-z ]+)\}?", latex)
    return bare[1].replace(" ", "").lower() if bare else None
