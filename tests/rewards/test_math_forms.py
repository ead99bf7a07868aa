"""The ways people write an answer, form by form: what the verifier takes for the same and what it does not."""

import pytest

from luffy.rewards import build_verifier
from luffy.types import Problem

# form: (gold, boxed content) that must be right, then that must be wrong
MATH = {
    "multiple choice": (
        [("A", "(A)"), ("B", r"\textbf{(B)}"), ("B", r"\text{B}"), ("C", r"\mathrm{C}")],
        [("A", "B"), ("B", r"\text{A}"), ("A", "A, B")],
    ),
    "intervals": (
        [
            ("(0, 1]", "(0,1]"),
            (r"(-\infty,3)\cup(5,\infty)", r"(5,\infty) \cup (-\infty, 3)"),
            (r"x \in [1,2]", "[1,2]"),
            (r"\left[\frac12, 1\right)", "[0.5,1)"),
            ("$t(0,4]$", "(0,4]"),
            ("$t(0,4]$", r"t \in (0, 4]"),
        ],
        # an inequality is not taken for the interval that was asked for
        [("[0,1]", "(0,1)"), ("(0,1]", "[0,1)"), ("[1,2]", "[1,3]"), ("[0,1]", r"0\le x\le 1"), ("$t(0,4]$", "(0,4)")],
    ),
    "sets": (
        [(r"\{1,2,3\}", r"\{3,1,2\}"), (r"\{1,2\}", "1, 2"), ("1,2,3", "3,2,1"), (r"\emptyset", r"\varnothing")],
        [(r"\{1,2\}", r"\{1,3\}"), (r"\{1,2\}", r"\{1,2,3\}"), (r"\emptyset", r"\{0\}")],
    ),
    "percentages": (
        [("50%", r"50\%"), (r"50\%", "0.5"), (r"12.5\%", r"\frac18"), ("50", r"50\%"), (r"0.05\%", "0.0005")],
        [("50%", r"5\%"), (r"50\%", "0.05"), ("0.0001", r"0.1\%")],
    ),
    "units": (
        [
            ("5", r"5 \text{ cm}"), ("5 cm", "5"), (r"5\text{ cm}", r"5\,\mathrm{cm}"), ("10", r"10 \text{ cm}^2"),
            ("30", r"30^\circ"), ("30", r"30 \text{ degrees}"), ("12", r"12\text{ square units}"),
        ],
        [("5", r"6 \text{ cm}"), ("30", r"31^\circ")],
    ),
    "fractions": (
        [
            (r"\frac{3}{4}", "0.75"), (r"\frac{3}{4}", r"\frac{6}{8}"), ("3/4", r"\tfrac{3}{4}"), (r"\frac34", "3/4"),
            (r"1\frac{1}{2}", r"\frac32"), ("-1./3", r"-\frac13"), ("-3./2", "-1.5"),
        ],
        [(r"\frac{1}{3}", "0.333"), (r"\frac{3}{4}", r"\frac{4}{3}"), ("-1./3", r"\frac13")],
    ),
    "matrices": (
        [
            (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2\\ 3 & 4\end{bmatrix}"),
            (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}"),
        ],
        [
            (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        ],
    ),
    "thousands separators": (
        [
            ("10000", "10,000"), ("10,000", "10{,}000"), ("10,000", r"10\,000"), ("1234567", "1,234,567"),
            ("10,080", "10080"), (r"11,\! 111,\! 111,\! 100", "11111111100"),
        ],
        [("1,234", "1,235"), ("10000", r"10\,00"), ("1,234", "1.234")],
    ),
    "currency": (
        [
            (r"\$5", "5"), ("5", r"\$5"), (r"\$18.90", "18.9"), ("1000", r"\$1,000"), ("5", r"5 \text{ dollars}"),
            ("5", "€5"), ("5", r"\text{€}5"), ("7.5", "£7.50"),
        ],
        [(r"\$5", r"\$6"), ("5", "€50")],
    ),
    "tiny numbers": (
        [("2.88e-19", r"2.88 \times 10^{-19}"), ("1e-8", r"10^{-8}"), ("0", "0.0"), ("0.0005", r"\frac{1}{2000}")],
        [("2.88e-19", "1.325e-27"), ("2.88e-19", "0"), ("1e-8", "2e-8"), ("0", "1e-9"), ("3.3e-10", "-3.3e-10")],
    ),
    "names on the left": (
        [(r"$m_{\max }=n^{2}-n-1$", "n^2-n-1"), ("x_1 = 4", "4"), ("np.arcsin(10/13)", r"\arcsin(10/13)")],
        [(r"$m_{\max }=n^{2}-n-1$", "n^2-n+1"), ("np.arcsin(10/13)", r"\arccos(10/13)")],
    ),
    "subscripts": ([("E_{1},E_{2}", "E_1, E_2")], [("E_{1},E_{2}", "E_1")]),
}  # fmt: skip

CHOICE = (
    [("B", "B"), ("B", "(b)"), ("B", r"\text{B}"), ("B", r"\textbf{(B) } 5"), ("J", "J")],
    [("B", "A"), ("B", "A or B"), ("B", "5")],
)


def verdicts(verifier, pairs):
    items = [
        (Problem(id=str(i), prompt="", answer=gold), rf"So \boxed{{{said}}}.") for i, (gold, said) in enumerate(pairs)
    ]
    return verifier.score(items)


def check(verifier, right, wrong):
    scores = verdicts(verifier, right + wrong)
    found = [score.value for score in scores]
    expected = [1.0] * len(right) + [0.0] * len(wrong)
    assert [p for p, f, e in zip(right + wrong, found, expected, strict=True) if f != e] == []
    assert {score.status for score in scores} <= {"ok", "no_answer"}


@pytest.mark.parametrize("form", MATH)
def test_forms(math_verifier, form):
    check(math_verifier, *MATH[form])


def test_multiple_choice_with_its_own_reward():
    with build_verifier("choice") as verifier:
        check(verifier, *CHOICE)
