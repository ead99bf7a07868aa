"""Exact arithmetic on expressions of a policy: whole numbers and fractions, with limits on their size."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

LONGEST = 400  # characters of an expression
MOST_BITS = 1024  # of a numerator or a denominator
DIGITS = 12  # of a fraction that no decimal writes exactly
PLAIN = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "^": "**"})
NUMBER = re.compile(r"\d[\d_]*\.?[\d_]*(?:[eE][+-]?\d{1,3})?|\.\d[\d_]*(?:[eE][+-]?\d{1,3})?")

TWO: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max, "round": round}


def evaluate(expression: str) -> Fraction:
    """The exact value. A ValueError says what is wrong with the expression."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    text = expression.translate(PLAIN).strip()
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    try:
        return _value(tree.body, text)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except RecursionError:
        raise ValueError("the expression is nested too deeply") from None


def shown(value: Fraction) -> str:
    """A whole number or a decimal if that is exact, else the fraction and about what it is."""
    if value.denominator == 1:
        return str(value.numerator)
    twos_and_fives = value.denominator
    for prime in (2, 5):
        while twos_and_fives % prime == 0:
            twos_and_fives //= prime
    places = value.denominator.bit_length()
    if twos_and_fives == 1 and places <= 60:  # a denominator 2^a 5^b has at most so many places
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:].rstrip('0')}"
    return f"{value} (about {_about(value)})"


def _about(value: Fraction) -> str:
    try:
        return f"{float(value):.{DIGITS}g}"
    except OverflowError:
        return "too large to write"


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return _number(node, text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        inner = _value(node.operand, text)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left, text), _value(node.right, text))
    if isinstance(node, ast.BinOp) and type(node.op) in TWO:
        return _bounded(Fraction(TWO[type(node.op)](_value(node.left, text), _value(node.right, text))))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and node.args:
        return _applied(node.func.id, [_value(argument, text) for argument in node.args])
    if isinstance(node, ast.Tuple):
        raise ValueError("write numbers without commas")
    raise ValueError(f"only numbers, + - * / // % ** and {', '.join(FUNCTIONS)} are known")


def _number(node: ast.Constant, text: str) -> Fraction:
    """A number as it is written: 0.1 is a tenth."""
    written = ast.get_source_segment(text, node) or ""
    if isinstance(node.value, bool) or not NUMBER.fullmatch(written):
        raise ValueError(f"{written[:40]!r} is no number")
    return _bounded(Fraction(written))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be a whole number")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and abs(exponent) * (bits - 1) > MOST_BITS:
        raise ValueError("the number is too large")
    return _bounded(base ** (exponent.numerator % 2 if bits <= 1 and base else exponent.numerator))


def _applied(name: str, values: list[Fraction]) -> Fraction:
    if name == "round" and len(values) == 2:
        places = values[1]
        if places.denominator != 1 or abs(places) > 100:
            raise ValueError("round takes a whole number of places, up to 100")
        return Fraction(round(values[0], int(places)))
    if name in ("abs", "round") and len(values) != 1:
        raise ValueError(f"{name} takes one number")
    return Fraction(min(values) if name == "min" else max(values) if name == "max" else FUNCTIONS[name](values[0]))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError("the number is too large")
    return value
