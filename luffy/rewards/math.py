"""Mathematical answers compared by Math-Verify. Runs inside a worker process (see ``pool``).

Math-Verify limits itself with SIGALRM, which works only in a process's main thread and not inside one
long C call. So its 2 s limits are the polite first line, and the pool's kill is the one that holds.
"""

from __future__ import annotations

import cmath
import logging
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from luffy.errors import UserError
from luffy.rewards.extract import boxed_answer, plain, tail
from luffy.rewards.numeric import announced_alternatives

LIMIT_S = 2.0  # of CPU time, so that a busy machine changes no score
INSTALL_HINT = 'pip install "math-verify[antlr4_13_2]==0.9.0"'

# (gold, response, expected score): wrong percentages are what an old antlr runtime silently causes. Together they use
# every part of sympy that scoring imports.
SELF_CHECKS = (
    (r"50\%", r"\boxed{0.5}", 1.0),
    (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
    ("1", r"\boxed{2}", 0.0),
    (r"\left(3, \frac{\pi}{2}\right)", r"\boxed{(3, \pi/2)}", 1.0),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
    ("A", r"\boxed{A, B}", 0.0),
    (r"(-\infty,2)\cup(2,\infty)", r"\boxed{x < 2 \text{ or } x > 2}", 1.0),
    ("k = 45, n = 2", r"\boxed{n = 2, k = 45}", 1.0),
    ("y = 2x + 1", r"\boxed{2x - y + 1 = 0}", 1.0),
)

_SPACING = re.compile(r"\\[,;:! ]|~")
_SIZING = re.compile(r"\\(?:left|right)(?![a-zA-Z])")
_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_LOOSE_SPACE = re.compile(r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])")
_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]\+?(-?\d{1,4})", re.ASCII)
_WORD = re.compile(r"[A-Za-z]{4,}")
_WORD_OF_TWO = re.compile(r"o[a-z]|[a-z]o")
_ONE_CHARACTER_GROUP = re.compile(r"([_^])\{(\w)\}")

# Spellings Math-Verify reads as text, or not at all, and the ones it reads as mathematics.
_THIN_THOUSANDS = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))", re.ASCII)
_OTHER_CURRENCY = re.compile(r"\\(?:text|mathrm)\{\s*[€£¥₹]\s*\}|\\(?:euro|pounds)(?![a-zA-Z])|[€£¥₹]")
_BARE_POINT = re.compile(r"(?<=\d)\.(?=[-+*/)\\ ]|$)", re.ASCII)
_NUMPY_NAME = re.compile(r"\bnp\.(?=[a-z])")
_EMPTY_SET = re.compile(r"\\varnothing(?![a-zA-Z])")
_SUBSCRIPTED_NAME = re.compile(r"^[A-Za-z]_(?:\{[^{}=]*\}|\w)\s*=(?=[^=<>]+$)")
# "t(0,4]" has lost its \in: brackets of two kinds are an interval, never a function's
_LOST_MEMBERSHIP = re.compile(r"[A-Za-z]\s*(?=(?:\([^()\[\]]*,[^()\[\]]*\]|\[[^()\[\]]*,[^()\[\]]*\))$)")

# Math-Verify rounds to 6 decimals, which makes 2.88e-19 and 1.3e-27 the same number: below this size we look again.
_TINY = 1e-3
_TINY_TOLERANCE = 1e-5  # relative


def load() -> Callable[[str, str], tuple[float, str]]:
    """Import Math-Verify once per worker and return the scoring function.

    The first formula makes Math-Verify import its parsers and build their tables, which takes seconds on a busy
    machine. It is read here, where no limit runs; otherwise the first response could be scored "timeout"."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UserError(f"the math reward needs Math-Verify ({error}); {INSTALL_HINT}") from error
    # It would log one line per timeout; the status of the score says the same.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for gold, response, _ in SELF_CHECKS:
        known, read = parse(as_boxed(gold), parsing_timeout=None), parse(response, parsing_timeout=None)
        verify(known, read, timeout_seconds=None)
        same_solutions(known[0], gold, read[0], response)
    return score


def score(answer: str, response: str) -> tuple[float, str]:
    """(1 or 0, status). The last box is the answer; without one, what Math-Verify finds in the text."""
    from math_verify.errors import TimeoutException

    text = plain(tail(response))
    boxed = boxed_answer(text)
    if boxed is None:
        boxed = announced_alternatives(text)
    if boxed is not None and same_text(boxed, answer):
        return 1.0, "ok"
    if boxed is not None and (
        is_anagram(boxed, answer) or brackets_disagree(*map(normalise, (boxed, _gold_text(answer))))
    ):
        return 0.0, "ok"
    try:
        gold = parse_gold(answer)
        guess = _parse(as_boxed(boxed) if boxed is not None else text)
        if not guess:
            return 0.0, "no_answer"
        equal = _any_equal(gold, guess) or (boxed is not None and _same_solutions(gold, answer, guess, boxed))
        return float(equal), "ok"
    except TimeoutException:
        return 0.0, "timeout"


def same_text(boxed: str, answer: str) -> bool:
    """Equal up to LaTeX layout that never changes the meaning: certainly right, no parser needed."""
    gold = normalise(_gold_text(answer))
    return bool(gold) and normalise(boxed) == gold


def is_anagram(boxed: str, answer: str) -> bool:
    """Whether both are letters alone, the same ones in another order. Math-Verify would take them for the same product;
    three letters or more may be a word or an arrangement, and two are a product unless an ``o`` makes them a word."""
    said, gold = all_letters(normalise(boxed)), all_letters(normalise(_gold_text(answer)))
    if said is None or gold is None or said == gold or sorted(said) != sorted(gold):
        return False
    return len(gold) > 2 or _WORD_OF_TWO.fullmatch(gold) is not None


def normalise(latex: str) -> str:
    """LaTeX without layout that never changes the meaning."""
    latex = undress(latex).rstrip(".")
    latex = _SIZING.sub("", _SPACING.sub(" ", latex))
    latex = _FRACTION.sub(r"\\frac", latex)
    latex = _ONE_CHARACTER_GROUP.sub(r"\1\2", latex)
    return _LOOSE_SPACE.sub("", " ".join(latex.split())).strip()


def undress(latex: str) -> str:
    """LaTeX without the delimiters around all of it: ``$x$`` becomes ``x``, ``$x$ or $y$`` stays."""
    latex = latex.strip()
    for opening, closing in _MATH_DELIMITERS:
        inner = latex[len(opening) : -len(closing)]
        if latex == opening + inner + closing and inner and "$" not in inner:
            return inner.strip()
    return latex


def as_boxed(latex: str) -> str:
    """A form Math-Verify reads as one answer. It takes ``1e3`` for ``1*e*3`` and a word for a product
    of letters (any anagram would be right), so both are rewritten."""
    latex = respell(undress(latex))
    scientific = _SCIENTIFIC.fullmatch(latex)
    if scientific:
        latex = rf"{scientific[1]} \cdot 10^{{{scientific[2]}}}"
    elif _WORD.fullmatch(latex):
        latex = rf"\text{{{latex}}}"
    return rf"\boxed{{{latex}}}"


def respell(latex: str) -> str:
    """Thin-space thousands, currency signs, ``1./3``, ``np.arcsin``, ``m_{max} = ...`` in readable form."""
    latex = _OTHER_CURRENCY.sub("", _THIN_THOUSANDS.sub("", latex))
    latex = _NUMPY_NAME.sub(r"\\", _BARE_POINT.sub("", latex))
    latex = _SUBSCRIPTED_NAME.sub("", _EMPTY_SET.sub(r"\\emptyset", latex)).strip()
    lost = _LOST_MEMBERSHIP.match(latex)
    return latex[lost.end() :] if lost else latex


@lru_cache(maxsize=1024)
def parse_gold(answer: str) -> list[Any]:
    """Cached, because all samples of a problem share the gold. Raises when nothing can be read from it."""
    gold = _parse(as_boxed(_gold_text(answer)))
    if not gold:
        raise ValueError(f"Math-Verify finds no answer in the gold {answer[:80]!r}")
    return gold


def load_reader() -> Callable[[str], bool]:
    """``is_read_as_text`` for a worker process, with Math-Verify imported as ``load`` does."""
    load()
    return is_read_as_text


def is_read_as_text(answer: str) -> bool:
    """Whether Math-Verify finds no mathematics in a gold: only an answer written the same way can be right."""
    return all(isinstance(reading, str) for reading in parse_gold(answer))


def _gold_text(answer: str) -> str:
    answer = plain(answer)
    boxed = boxed_answer(answer)
    return answer if boxed is None else boxed


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Raises Math-Verify's TimeoutException after ``LIMIT_S`` seconds of CPU time. For the main thread of a process."""
    from math_verify.errors import TimeoutException

    def end(*_: Any) -> None:
        raise TimeoutException(f"more than {LIMIT_S:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    try:
        with _cpu_limit():
            found: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
        return found
    except (MemoryError, OSError):
        raise
    except Exception:  # whatever the grammar or sympy raises on nonsense: there is no answer in it
        return []


def _any_equal(gold: list[Any], guess: list[Any]) -> bool:
    """Math-Verify keeps a parsed and a literal reading of each side; one equal pair is enough. An error
    in comparing a pair means that Math-Verify cannot show it equal; running out of time is reported."""
    from math_verify import verify

    for one_gold, one_guess in product(gold, guess):
        try:
            with _cpu_limit():
                equal = verify(one_gold, one_guess, timeout_seconds=None, raise_on_error=True)
                if equal and not _rounded_away(one_gold, one_guess) and not names_disagree(one_gold, one_guess):
                    return True
        except (MemoryError, OSError):
            raise
        except Exception:
            continue
    return False


def _same_solutions(gold: list[Any], answer: str, guess: list[Any], boxed: str) -> bool:
    """``same_solutions`` of what Math-Verify has read as mathematics."""
    if isinstance(gold[0], str) or isinstance(guess[0], str):
        return False
    try:
        with _cpu_limit():
            return same_solutions(gold[0], _gold_text(answer), guess[0], boxed)
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return False  # sympy cannot solve it


def _rounded_away(gold: Any, guess: Any) -> bool:
    """Whether two numbers were only equal because both round to the same few decimals."""
    if not (getattr(gold, "is_number", False) and getattr(guess, "is_number", False)):
        return False
    try:
        one, other = complex(gold.doit()), complex(guess.doit())
    except TypeError:  # no plain value, such as complex infinity: Math-Verify's verdict stands
        return False
    if abs(one) >= _TINY:
        return False
    # Math-Verify takes 5% for 0.05 and for 5.
    scales = (1.0, 100.0, 0.01) if _is_percentage(gold) or _is_percentage(guess) else (1.0,)
    smallest = 1e-12 if one == 0 else 0.0
    return not any(cmath.isclose(one, other * s, rel_tol=_TINY_TOLERANCE, abs_tol=smallest) for s in scales)


def _is_percentage(number: Any) -> bool:
    """Math-Verify writes 5% as the product 5 * (1/100), the latter marked to be left alone."""
    from sympy import UnevaluatedExpr

    return bool(number.has(UnevaluatedExpr))


# ---- corrections of Math-Verify
# It reads brackets and the order of named values too freely, and does not compare an inequality with the interval that
# it describes.

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
