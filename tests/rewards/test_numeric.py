import json
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest
from adversarial_inputs import RESPONSES
from hypothesis import given
from hypothesis import strategies as st

from luffy.rewards.numeric import gold_number, read_number, score_lenient, score_strict


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("42.", 42),
        ("-7", -7),
        ("\u22127", -7),
        ("- 5", -5),
        ("+5", 5),
        ("1,234", 1234),
        ("12,345,678.50", Fraction("12345678.5")),
        ("1{,}234", 1234),
        ("1\\,234", 1234),
        ("$1,234.50", Fraction("1234.5")),
        ("\\$5", 5),
        ("-$5", -5),
        ("\u20ac3", 3),
        ("50%", 50),
        ("50\\%", 50),
        ("5 apples", 5),
        ("\\text{5 dollars}", 5),
        ("90^\\circ", 90),
        ("**42**", 42),
        ("0.50", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("3 1/2", Fraction(7, 2)),
        ("\u00bd", Fraction(1, 2)),
        ("3\u00bd", Fraction(7, 2)),
        ("\\frac{1}{2}", Fraction(1, 2)),
        ("-\\dfrac{1}{2}", Fraction(-1, 2)),
        ("3\\frac12", Fraction(7, 2)),
        ("1e3", 1000),
        ("2.5e-1", Fraction(1, 4)),
        ("x = 5", 5),
        ("2 + 3 = 5", 5),
        ("\uff11\uff12", 12),
        ("\u0663\u066b\u0665", Fraction(7, 2)),
        ("Rs.500", 500),
        ("007", 7),
    ],
)
def test_read_number(text, number):
    assert read_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "42 or 43",
        "42 and 43",
        "42, 43",
        "x = 5 or x = 6",
        "42\\text{ or }43",
        "42 apples or 43",
        "1,2",
        "(3,4)",
        "1,2345",
        "10^3",
        "\\sqrt{2}",
        "2\\pi",
        "1/0",
        "x5",
        "1e9999",
        "1/2/3",
    ],
)
def test_what_is_no_plain_number(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("#### 42 or 43", 0, 0), ("#### 43 or 42", 0, 0), ("#### 43 or #### 42", 0, 0), ("#### 42, or 43 if rounded", 0, 0),
        (r"\boxed{43} or \boxed{42}", 0, 0), (r"\boxed{42 \text{ or } 43}", 0, 0), ("The answer is 42 or 43.", 0, 0),
        ("The answer is 43 or 42.", 0, 0),
        ("#### 42 or so", 1, 1), ("#### 42 (6 and 7 multiplied)", 1, 1), ("#### 42 days, not 43", 1, 1),
        ("#### 42.0 or 42", 1, 1), ("#### 42 dollars, 5 more than before", 1, 1), ("#### 43\n\n#### 42", 1, 1),
    ],
)  # fmt: skip
def test_two_numbers_are_no_answer(text, strict, lenient):
    assert (score_strict("42", text)[0], score_lenient("42", text)[0]) == (strict, lenient)


def test_no_float_is_involved():
    assert score_strict("0.3", "#### 0.30000000000000001") == (0.0, "ok")
    assert score_strict("9007199254740993", "#### 9007199254740992") == (0.0, "ok")
    assert score_strict("0.1", "\\boxed{1/10}") == (1.0, "ok")


@pytest.mark.parametrize(
    ("response", "strict", "lenient"),
    [
        ("2 + 3 = 5\n#### 5", (1.0, "ok"), (1.0, "ok")),
        ("#### $5.00 per day", (1.0, "ok"), (1.0, "ok")),
        ("#### Final answer: 5", (1.0, "ok"), (1.0, "ok")),
        ("####\n5", (1.0, "ok"), (1.0, "ok")),
        ("#### 4\nno, sorry\n#### 5", (1.0, "ok"), (1.0, "ok")),
        ("so \\boxed{5}", (1.0, "ok"), (1.0, "ok")),
        ("\\boxed{4} then #### 5", (1.0, "ok"), (1.0, "ok")),
        ("#### 4\n\\boxed{5}", (1.0, "ok"), (1.0, "ok")),
        ("#### 1. Compute\nfive\n#### Step 2\n\\boxed{5}", (1.0, "ok"), (1.0, "ok")),
        ("#### 4 no, #### 5", (1.0, "ok"), (1.0, "ok")),
        ("#### 6", (0.0, "ok"), (0.0, "ok")),
        ("5, so \\boxed{none}", (0.0, "no_answer"), (0.0, "no_answer")),
        ("The answer is 5.", (0.0, "no_answer"), (1.0, "ok")),
        ("**Answer:** $5", (0.0, "no_answer"), (1.0, "ok")),
        ("The answer is 4. No, the answer is 5 (not 7).", (0.0, "no_answer"), (1.0, "ok")),
        ("We get 3 and then 5", (0.0, "no_answer"), (1.0, "ok")),
        ("We get 5 and then 3", (0.0, "no_answer"), (0.0, "ok")),
        ("10-5", (0.0, "no_answer"), (1.0, "ok")),
        ("nothing", (0.0, "no_answer"), (0.0, "no_answer")),
        ("", (0.0, "no_answer"), (0.0, "no_answer")),
        ("#### 5" + " " * 5000, (0.0, "no_answer"), (0.0, "no_answer")),
    ],
)
def test_strict_wants_a_mark_and_lenient_does_not(response, strict, lenient):
    assert score_strict("5", response) == strict
    assert score_lenient("5", response) == lenient


def test_gold_may_be_a_whole_solution_but_must_hold_a_number():
    assert gold_number("He sells 3 of 8.\n#### 1,005") == 1005
    with pytest.raises(ValueError, match="'many' is not a number"):
        score_strict("many", "#### 5")


@given(st.integers(-(10**30), 10**30), st.integers(0, 12))
def test_any_decimal_is_equal_to_its_fraction(units, places):
    whole, rest = divmod(abs(units), 10**places)
    text = f"{'-' if units < 0 else ''}{whole:,}" + (f".{rest:0{places}d}" if places else "")
    assert read_number(text) == Fraction(units, 10**places)


@given(st.text(max_size=300))
def test_any_text_has_a_verdict(text):
    for scorer in (score_strict, score_lenient):
        value, status = scorer("5", text)
        assert (value, status) in {(1.0, "ok"), (0.0, "ok"), (0.0, "no_answer")}


def test_time_is_bounded_on_hostile_text():
    hostile = ["1,", "1,111", "1/", "#### ", "#### 1\n", "####", "answer ", "answer: ", ". ", "1 ", "9", "1e9", " "]
    for text in [*RESPONSES, *(piece * (8192 // len(piece)) for piece in hostile), "answer" + "*" * 4000]:
        started = time.process_time()
        score_strict("42", text)
        score_lenient("42", text)
        assert time.process_time() - started < 2, text[:40]  # of work, however busy the machine is


@pytest.mark.skipif("LUFFY_DATA" not in os.environ, reason="LUFFY_DATA does not name the data folder")
@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
def test_every_gsm8k_solution_verifies_against_its_own_gold(split, rows):
    path = Path(os.environ["LUFFY_DATA"]) / "gsm8k" / f"{split}.jsonl"
    solutions = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert len(solutions) == rows
    for solution in solutions:
        gold = solution.rpartition("####")[2].strip()
        assert score_strict(gold, solution) == (1.0, "ok"), gold
        assert score_strict(gold.replace(",", "") + "1", solution) == (0.0, "ok"), gold
