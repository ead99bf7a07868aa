"""GSM8K problems with other numbers, other names and some other words, and the answer worked out anew.

The calculator marks of a solution (``<<48/2=24>>``) are a program. Numbers of the question are changed, the program is
run again with them, and a problem is kept only where that is unambiguous: every changed number stands once in the
question, in digits; every number of the program is in the question, came out before, or is one that everybody knows;
none of them could mean two things; and every result that was a whole number is one again.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from fractions import Fraction
from typing import Any

MARK = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
NUMBER = re.compile(r"(?<![\d.,])\d+(?:\.\d+)?(?![\d.,]*\d)")
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
NAMES = {
    "she": (
        "Mary", "Anna", "Emma", "Sarah", "Lisa", "Julia", "Kate", "Jane", "Natalia", "Betty", "Maria", "Jenny", "Emily",
        "Amy", "Carla", "Rachel", "Tina", "Susan", "Janet", "Wendy", "Alice", "Sophia", "Olivia", "Rebecca", "Jessica",
        "Melissa", "Samantha", "Claire", "Marie", "Gina",
    ),
    "he": (
        "John", "James", "Tom", "Mark", "Bob", "Peter", "Jack", "David", "Mike", "Carlos", "Tim", "Bill", "Joe", "Paul",
        "Adam", "Kevin", "Jerry", "Steve", "Harry", "Ben", "Brian", "Eric", "Jason", "Josh", "Greg", "Matt", "Sam",
        "George", "Robert", "Ryan",
    ),
}  # fmt: skip
WORDS = {
    "buys": "purchases", "bought": "purchased", "gets": "receives", "gave": "handed", "gives": "hands",
    "wants": "would like", "needs": "requires", "altogether": "in all", "in total": "in all", "begins": "starts",
    "kids": "children", "large": "big", "small": "little", "every": "each", "earns": "makes", "bigger": "larger",
}  # fmt: skip
LARGEST = 100_000
COUNT_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS_WORDS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# Numbers that a word of the question brings with it: a program may mean these where it says them.
IMPLIED = {
    r"thirds?|thrice|tripl\w+|yards?|foot|feet": (3,),
    r"quarters?": (4, 15, 25),
    r"fourths?|quadrupl\w+|quarts?|gallons?|squares?|seasons?": (4,),
    r"fifths?|nickels?|weekdays?|weeks?": (5, 7, 52),
    r"sixths?|half a dozen": (6,),
    r"eighths?|work\w*": (8,),
    r"tenths?|dimes?|decades?|centimeters?": (10,),
    r"dozens?|inch\w*|foot|feet": (12, 36),
    r"ounces?|pounds?": (16,),
    r"days?|nights?|daily": (7, 24),
    r"months?|monthly|years?|yearly|annual\w*": (4, 12, 28, 30, 31, 52, 365),
    r"hours?|minutes?|seconds?": (15, 24, 30, 60),
    r"percent\w*|cents?|penn\w+|dollars?|hundreds?": (100,),
    r"kilo\w+|meters?|lit\w+|grams?|tons?|thousands?": (1000,),
}
ALWAYS = {1, 2}  # half of it, twice as much, and itself
WRITTEN = re.compile(r"\d[\d,]*\.?\d*")
FIXED = re.compile(r"(\d+)/(\d+)|(\d+):(\d+)|(\d+(?:\.\d+)?) ?(?:%|percent)")  # parts of a whole, times of day
TERM = re.compile(r"\d*\.?\d+")


def variant(row: dict[str, Any], rng: random.Random) -> dict[str, Any] | None:
    """Another problem with the same program; None where it cannot be made safely."""
    question, solution = row["question"], row["answer"]
    program = MARK.findall(solution)
    final = solution.rsplit("####", 1)[-1].strip().replace(",", "")
    if not program or not _same_number(program[-1][1], final):
        return None
    changes = _changes(question, program, rng)
    if changes is None:
        return None
    results = _run(program, changes)
    if results is None:
        return None
    changed = NUMBER.sub(lambda m: str(changes.get(Fraction(m[0]), m[0])), question)
    return {"prompt": reword(changed, rng), "answer": str(results[-1])}


def _changes(question: str, program: list[tuple[str, str]], rng: random.Random) -> dict[Fraction, int] | None:
    """New values for the whole numbers of the question that the program uses and that mean one thing."""
    given = Counter(Fraction(n.replace(",", "").rstrip(".")) for n in WRITTEN.findall(question))
    fixed = _fixed(question)
    if not _is_explained(program, given.keys() | fixed):
        return None
    terms = [Counter(map(Fraction, TERM.findall(expression))) for expression, _ in program]
    once = {n for n, times in given.items() if times == 1 and max(part[n] for part in terms) == 1}
    able = [n for n in given if n in once - fixed and n.denominator == 1 and 3 <= n <= 1000]
    return {n: _another(int(n), rng) for n in able} or None


def _fixed(question: str) -> set[Fraction]:
    """Numbers that may be in the program for another reason than that they stand in the question in digits."""
    text = question.lower()
    said = {n for n, word in enumerate(COUNT_WORDS) if re.search(rf"\b{word}\b", text)}
    tens = {10 * n for n, word in enumerate(TENS_WORDS, 2) if re.search(rf"\b{word}\b", text)}
    implied = {n for words, numbers in IMPLIED.items() if re.search(rf"\b(?:{words})\b", text) for n in numbers}
    parts = {Fraction(n) for found in FIXED.findall(text) for n in found if n}
    if "%" in text:
        implied.add(100)
    return parts | {Fraction(n) for n in ALWAYS | said | tens | implied | {a + b for a in tens for b in said}}


def _is_explained(program: list[tuple[str, str]], known: AbstractSet[Fraction]) -> bool:
    """A number from nowhere was worked out in someone's head, from numbers that may now be others."""
    came_out: set[Fraction | None] = set()
    for expression, value in program:
        if any(Fraction(n) not in known and Fraction(n) not in came_out for n in TERM.findall(expression)):
            return False
        came_out.add(_number(value))
    return not came_out & known  # else a number of the program could be either


def _another(value: int, rng: random.Random) -> int:
    low, high = max(2, round(value * 0.6)), max(value + 2, round(value * 1.6))
    choices = [n for n in range(low, high + 1) if n != value and (value % 10 or n % 10 == 0)]
    return rng.choice(choices or [value + 10])


def _run(program: list[tuple[str, str]], changes: dict[Fraction, int]) -> list[Fraction] | None:
    now: dict[Fraction, Fraction] = {old: Fraction(new) for old, new in changes.items()}
    results = []
    for expression, value in program:
        before = _number(value)
        after = _evaluate(expression, now)
        if before is None or after is None or _evaluate(expression, {}) != before:
            return None
        if not 0 < after <= LARGEST or (before.denominator == 1 and after.denominator != 1):
            return None
        if now.get(before, after) != after:
            return None  # the same number came out twice and would now be two
        now[before] = after
        results.append(after)
    return results if results[-1].denominator == 1 else None


def _evaluate(expression: str, now: dict[Fraction, Fraction]) -> Fraction | None:
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, expression.strip(), now)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr, text: str, now: dict[Fraction, Fraction]) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, text, now), _value(node.right, text, now))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        number = Fraction(ast.get_source_segment(text, node) or "")
        return now.get(number, number)
    raise ValueError(f"no plain arithmetic: {text}")


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text.strip().replace(",", ""))
    except ValueError:
        return None


def _same_number(left: str, right: str) -> bool:
    return _number(left) is not None and _number(left) == _number(right)


def reword(question: str, rng: random.Random) -> str:
    for names in NAMES.values():
        here = [n for n in names if re.search(rf"\b{n}\b", question)]
        others = rng.sample([n for n in names if n not in here], k=min(len(here), len(names) - len(here)))
        swap = dict(zip(here, others, strict=False))
        question = re.sub(r"\b[A-Z][a-z]+\b", lambda m, swap=swap: swap.get(m[0], m[0]), question)
    pattern = re.compile(r"\b(" + "|".join(WORDS) + r")\b")
    return pattern.sub(lambda m: WORDS[m[0]], question)


def variants(rows: Iterable[dict[str, Any]], seed: int) -> Iterator[dict[str, Any]]:
    """What can be made of the rows, in their order."""
    for i, row in enumerate(rows):
        made = variant(row, random.Random(f"{seed}:{i}"))
        if made is not None:
            yield made
