"""Final numbers compared exactly, as fractions: ``0.50`` is ``1/2`` and ``0.1 + 0.2`` problems do not exist.

Two kinds. ``gsm8k`` is strict: the answer must be marked, by ``#### 42`` or ``\\boxed{42}`` (the later one
counts). ``numeric`` is lenient: without a mark it takes what follows the last "answer is" / "answer:",
and without that the last number of the text, so it can reward a response that never concludes.

Two numbers in one answer (``42 or 43``, ``42, 43``) are no answer.
A percent sign and units are not read: ``50%`` is 50, ``5 apples`` is 5. A ``####`` that opens a heading
(``#### 2. Compute``, ``#### Step 3``) is no mark. Text such as ``1,2`` or ``10^3`` is no number.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from luffy.rewards.extract import boxed_answer, last_boxed, plain, tail
from luffy.rewards.kinds import text_reward

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
        "\u066c": ",",
        "\u066b": ".",
        "\u2044": "/",
    }
)
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_FRAC = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?[\d.]+)\s*\}\s*\{\s*([\d.]+)\s*\}|(\d)\s*(\d))", re.ASCII)
_NOT_A_PLAIN_NUMBER = re.compile(r"\^|\\sqrt|\\times|\\cdot|\\pi|\u00d7")
_LATEX_SPACE = re.compile(r"\\[,!;: ]")
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LEADING_SIGN = re.compile(r"^\s*([-+])\s+")

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(
    rf"""
    (?: (?<![\w.)\]%]) (?P<sign>[-+]) )?
    (?<![A-Za-z\d]) (?<!\d[.,/])
    (?:
        (?P<whole>\d+)\s+(?P<top>\d+)/(?P<bottom>\d+)
      | (?P<value>{_UNSIGNED}) (?P<exponent>[eE][-+]?\d{{1,3}})? (?:\s*/\s*(?P<divisor>\d+(?:\.\d+)?))?
    )
    (?!\d|,\d|\.\d|\s*/\s*\d|[eE][-+]?\d)
    """,
    re.VERBOSE | re.ASCII,
)

# What follows a marker is captured by looking ahead, so that a later marker on the same line is found too.
_HASHES = re.compile(r"####(?!#)\s*(?:(?:final\s+)?answer\s*(?:is)?\s*:?\s*)?(?=([^\n]{0,200}))", re.IGNORECASE)
_HEADING = re.compile(r"\s*\d+\s*[.):]\s+[^\W\d]")
_SECOND_HASHES = re.compile(r"(?<=[\s,])(or|and)\s*####(?!#)\s*", re.IGNORECASE)
_ALTERNATIVE = re.compile(r"\s*[,;]\s*|\W*(?:[A-Za-z]+\W+){0,3}?(?:or|and)\s+(?:[A-Za-z]\w*\s*=\s*)?", re.IGNORECASE)
_LONGEST_ALTERNATIVE = 40
_ANSWER_IS = re.compile(r"\banswer\W{0,8}?(?:is\b|:|=)[\s:*]*(?=([^\n]{0,200}))", re.IGNORECASE)


@text_reward("gsm8k")
def score_strict(answer: str, response: str) -> tuple[float, str]:
    """Kind ``gsm8k``."""
    return _verdict(answer, find_marked(tail(response)))


@text_reward("numeric")
def score_lenient(answer: str, response: str) -> tuple[float, str]:
    """Kind ``numeric``."""
    text = tail(response)
    return _verdict(answer, find_marked(text) if has_mark(text) else find_unmarked(text))


def gold_number(answer: str) -> Fraction:
    """The gold's number; a full GSM8K solution ending in ``#### 72`` is fine too."""
    marked = find_marked(answer) if has_mark(answer) else read_number(answer)
    if marked is None:
        raise ValueError(f"the gold {answer[:80]!r} is not a number")
    return marked


def has_mark(text: str) -> bool:
    """Whether the text marks an answer by a box or ``####``."""
    return last_boxed(text) is not None or _last_hash_mark(text) is not None


def find_marked(text: str) -> Fraction | None:
    """Number in the last ``####`` or box, whichever comes later."""
    text = _SECOND_HASHES.sub(r"\1 ", text)
    box = last_boxed(text)
    hashes = _last_hash_mark(text)
    if box is not None and (hashes is None or hashes.start() < box.start):
        return read_number(boxed_answer(text) or "")
    return read_number(hashes[1]) if hashes is not None else None


def find_unmarked(text: str) -> Fraction | None:
    """Number after the last "answer is", else the last number of the text."""
    announced = _announced(text)
    if announced is not None:
        if alternatives(announced):
            return None
        if (number := read_number(announced)) is not None:
            return number
    numbers = list(_numbers(clean(text)))
    return numbers[-1] if numbers else None


def read_number(region: str) -> Fraction | None:
    """The number a short answer states: the first one, after the last equals sign if there is one. None if it offers
    another number instead of it."""
    stated = region.rpartition("=")[2]
    if _NOT_A_PLAIN_NUMBER.search(_DEGREES.sub("", stated)):
        return None
    number = next(_numbers(_LEADING_SIGN.sub(r"\1", clean(stated))), None)
    return None if number in map(_value, alternatives(region)) else number


def alternatives(region: str) -> list[re.Match[str]]:
    """The first two different numbers between which an answer leaves the choice, or which it lists; else none."""
    text = clean(region)
    for one, other in pairwise(NUMBER.finditer(text)):
        between = text[one.end() : other.start()]
        if len(between) <= _LONGEST_ALTERNATIVE and _ALTERNATIVE.fullmatch(between) and _value(one) != _value(other):
            return [one, other]
    return []


def announced_alternatives(text: str) -> str | None:
    """``42, 43`` if the last "answer is" of the text is followed by ``42 or 43``; else None."""
    found = alternatives(_announced(text) or "")
    if not found or found[0].string[: found[0].start()].strip():
        return None
    between = found[0].string[found[0].end() : found[1].start()]
    return f"{found[0][0]}, {found[1][0]}" if "or" in between.lower().split() else None


def _announced(text: str) -> str | None:
    """Text after the last "answer is"."""
    return next((match[1] for match in reversed(list(_ANSWER_IS.finditer(text)))), None)


def clean(text: str) -> str:
    """ASCII digits and signs, LaTeX fractions as ``a/b``, no currency signs, no markup."""
    if not text.isascii():
        text = "".join(map(_plain_character, plain(text.translate(_CHARACTERS))))
    text = _DEGREES.sub("", text).replace("{,}", ",")
    text = _FRAC.sub(_slashed, text)
    text = _LATEX_SPACE.sub("", text).replace("\\$", "").replace("\\%", "%")
    text = _LATEX_COMMAND.sub(" ", text)
    return text.translate(str.maketrans("{}", "  ", "$€£¥₹*"))


def _verdict(answer: str, found: Fraction | None) -> tuple[float, str]:
    gold = gold_number(answer)
    if found is None:
        return 0.0, "no_answer"
    return float(found == gold), "ok"


def _last_hash_mark(text: str) -> re.Match[str] | None:
    return next((match for match in reversed(list(_HASHES.finditer(text))) if _opens_with_number(match[1])), None)


def _opens_with_number(said: str) -> bool:
    said = _LEADING_SIGN.sub(r"\1", clean(said)).lstrip()
    return NUMBER.match(said) is not None and not _HEADING.match(said)


def _numbers(text: str) -> Iterator[Fraction]:
    for match in NUMBER.finditer(text):
        number = _value(match)
        if number is not None:
            yield number


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if match["sign"] == "-" else 1
    if match["whole"]:
        top, bottom = int(match["top"]), int(match["bottom"])
        return None if bottom == 0 else sign * (int(match["whole"]) + Fraction(top, bottom))
    number = Fraction(match["value"].replace(",", "") + (match["exponent"] or ""))
    divisor = Fraction(match["divisor"] or 1)
    return None if divisor == 0 else sign * number / divisor


def _plain_character(character: str) -> str:
    if character.isascii():
        return character
    if "VULGAR FRACTION" in unicodedata.name(character, ""):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    return character


def _slashed(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[3], match[2] or match[4]
    follows_digit = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return f"{' ' if follows_digit else ''}{top}/{bottom} "
