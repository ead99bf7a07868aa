import pytest

from luffy.rewards import choice
from luffy.rewards import format as format_reward


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{B}",
        r"\boxed{b}",
        r"\boxed{(B)}",
        r"\boxed{\text{B}}",
        r"\boxed{\textbf{(B)}}",
        r"\boxed{\text{B. Paris}}",
        r"\boxed{B) 12}",
        r"\boxed{A} is tempting, but \boxed{B}",
        "The answer is (B).",
        "The answer is (b)",
        "The correct answer is B because A is wrong.",
        "**Answer:** B",
        "Answer: option B",
        "The answer is A. No, the answer is B.",
        "the answer is $\\text{B}$",
        "Some thoughts on A.\n**B**",
        "**(B)** it is",
        "Thinking about A and C...\n\nB",
        "so:\n(B).",
        "The answer is B, I think.",
        "The answer is B, I\u2019m sure",
        "The answer is B and I am confident.",
        "The answer is B, or I misread it.",
        "The answer is (B), A is wrong because 2 < 3",
        "The answer is B (I checked)",
    ],
)
def test_right_choice(response):
    assert choice.score("B", response) == (1.0, "ok")
    assert choice.score("(B)", response) == (1.0, "ok")
    assert choice.score("C", response) == (0.0, "ok")


@pytest.mark.parametrize(
    "response",
    [
        "",
        "no letter",
        r"\boxed{A and B}",
        r"\boxed{A, B}",
        r"\boxed{(A)(B)}",
        r"\boxed{A. B. C.}",
        r"\boxed{12}",
        r"\boxed{}",
        "The answer is A or B",
        "The answer is (A) and (B)",
        "The answer is A, B",
        "The answer is A, I",
        "The answer is A and I.",
        "The answer is A, I or B",
        "The answer is A, I and B are close",
        "The answer is A/I as said",
        "The answer is B or A",
        "The answer is B or A, I think",
        "The answer is B or A depending on x",
        "The answer is B and A?",
        "The answer is B and A are right",
        "The answer is B, (A)",
        "The answer is B & A then",
        "The answer is B and A is also correct.",
        "The answer is B, A too.",
        "The answer is B and A together",
        "The answer is B or I think C",
        "The answer is A dog",
        "The answer is I think unclear",
        "The answer is a",
        "The answer is Berlin",
        "B is one of the options that I discuss",
    ],
)
def test_no_choice(response):
    assert choice.score("A", response) == (0.0, "no_answer")


def test_a_bare_word_letter_counts_when_it_ends_its_clause():
    assert choice.score("A", "The answer is A.") == (1.0, "ok")
    assert choice.score("I", "The answer is I") == (1.0, "ok")


def test_gold_must_be_a_letter():
    with pytest.raises(ValueError, match="'Paris' is not a letter"):
        choice.score("Paris", "B")


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>\n2+3\n</think>\nIt is 5.", 1.0),
        ("  <think>a</think>b", 1.0),
        ("the prompt opened it</think> 5", 1.0),
        ("<think>never closed", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think>  \n", 0.0),
        ("<think></think>5", 0.0),
        ("<think> </think>5", 0.0),
        ("5", 0.0),
        ("", 0.0),
        ("preamble <think>a</think>5", 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0),
        ("<think>a</think>b</think>c", 0.0),
        ("a</think>b<think>c", 0.0),
        ("<think><think>a</think>b", 0.0),
    ],
)
def test_format(response, value):
    assert format_reward.score("anything", response) == (value, "ok")
