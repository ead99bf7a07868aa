"""Mathematical answers compared by Math-Verify. Runs inside a worker process (see ``pool``).

Math-Verify limits itself with SIGALRM, which works only in a process's main thread and not inside one
long C call. So its 2 s limits are the polite first line, and the pool's kill is the one that holds.
"""

from __future__ import annotations

import cmath
import logging
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any

from luffy.errors import UserError
from luffy.rewards.extract import boxed_answer, plain, tail
from luffy.rewards.notation import all_letters, brackets_disagree, names_disagree, same_solutions
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
