"""Arithmetic is exact, and nothing that a policy writes takes long or runs code."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luffy.environments.arithmetic import evaluate, shown


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("2 + 3 * 4", "14"),
        ("0.1 + 0.2", "0.3"),
        ("7 / 2", "3.5"),
        ("-7 / 8", "-0.875"),
        ("1 / 3", "1/3 (about 0.333333333333)"),
        ("2 ^ 10", "1024"),
        ("2 ** -2", "0.25"),
        ("(-1) ** 1_000_001", "-1"),
        ("12 \u00d7 3 \u00f7 4 \u2212 1", "8"),
        ("7 // 2 + 7 % 4", "6"),
        ("1e3 + .5", "1000.5"),
        ("round(2.567, 2) + abs(-1) + max(1, 2) + min(3, 4)", "8.57"),
        ("10 ** 40", "1" + "0" * 40),
        ("1 / 2 ** 100", "1/1267650600228229401496703205376 (about 7.88860905221e-31)"),
    ],
)
def test_values_are_exact(expression, text):
    assert shown(evaluate(expression)) == text


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("5 % 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("(1/7) ** 99999", "too large"),
        ("1e999", "too large"),
        ("1e999999999", "is no number"),
        ("2 ** 0.5", "exponent must be a whole number"),
        ("1,000 + 2", "without commas|only numbers"),
        ("1,000", "without commas"),
        ("x + 1", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("'a' * 9", "is no number"),
        ("True", "is no number"),
        ("0x10", "is no number"),
        ("2 +", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("\0", "no arithmetic expression"),
        ("1+" * 300 + "1", "at most 400 characters"),
        ("round(1, 1e9)", "up to 100"),
        ("abs(1, 2)", "takes one number"),
        ("max()", "only numbers"),
    ],
)
def test_what_is_no_arithmetic_says_why(expression, why):
    with pytest.raises(ValueError, match=why):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/%()., e_\u00d7^", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_has_a_value_or_a_reason(text):
    try:
        assert shown(evaluate(text))
    except ValueError as error:
        assert str(error)


@given(st.fractions(max_denominator=10**6))
@settings(max_examples=200, deadline=None)
def test_what_is_shown_is_the_value(value):
    assert Fraction(shown(value).partition(" ")[0]) == value
