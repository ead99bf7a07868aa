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
        [("[0,1]", "(0,1)"), ("(0,1]", "[0,1)"), ("[1,2]", "[1,3]"), ("$t(0,4]$", "(0,4)")],
    ),
    "inequalities for intervals": (
        [
            (r"(-\infty,2]", r"x \le 2"), (r"(-\infty,2]", r"2 \ge x"), ("[0,1]", r"0\le x\le 1"),
            (r"x \in (1,2)", "1 < x < 2"), (r"[\frac12,\infty)", r"m \geq 0.5"), (r"(-\infty,\sqrt{2}]", r"a \le \sqrt2"),
            (r"(-\infty,-2)\cup(2,\infty)", r"x<-2 \text{ or } x>2"), (r"(-\infty,-2)\cup(2,\infty)", "x > 2, or x < -2"),
            (r"(-\infty,0)\cup(0,\infty)", r"x \neq 0"), (r"k\le -1 \text{ or } k\ge 3", r"(-\infty,-1]\cup[3,\infty)"),
            ("1<x<2", "(1,2)"),
        ],
        [
            (r"(-\infty,2]", "x < 2"), (r"(-\infty,2]", r"x \ge 2"), ("[0,1]", "0<x<1"), (r"(-\infty,2]", r"x \le 3"),
            ("(1,2)", "1<x<2"),  # may be a point
            (r"x \in (-\infty,2]", r"y \le 2"),  # another variable
            (r"(-\infty,-2)\cup(2,\infty)", r"x<-2 \text{ and } x>2"), (r"(-\infty,-2)\cup(2,\infty)", "x<-2, x>2"),
            (r"(-\infty,-2)\cup(2,\infty)", r"x\le-2 \text{ or } x>2"),
            (r"(-\infty,-2)\cup(2,\infty)", r"x<-2 \text{ or } y>2"), (r"(-\infty,0)\cup(0,\infty)", r"x \neq 1"),
            # not solved: it may be the problem itself
            ("[-2,2]", r"x^2 \le 4"), (r"[3,\infty)", r"2x \ge 6"), (r"[3,\infty)", r"x \le 2x-3"), ("[-1,1]", r"|x| \le 1"),
        ],
    ),
    "braces and parentheses": (
        [
            ("(1,2)", "1,2"), (r"\{1,2\}", "1,2"), (r"\{1,2\}", r"\{2,1\}"), (r"A=\{1,2\}", r"\{2,1\}"),
            (r"(1,2),(3,4)", r"\{(3,4),(1,2)\}"), (r"\{(1,2),(3,4)\}", "(1,2), (3,4)"),
        ],
        [
            ("(1,2)", r"\{1,2\}"), (r"\{1,2\}", "(1,2)"), (r"\{1,2\}", "(2,1)"), ("(1,2,3)", r"\{1,2,3\}"),
            ("(x,y)=(1,2)", r"\{1,2\}"), (r"S=\{1,2\}", "(1,2)"), (r"\{1,2\}", r"\left(1, 2\right)"),
        ],
    ),
    "named values": (
        [
            ("a_3 = 2, a_{37} = 19", r"a_{37} = 19, \quad a_3 = 2"), ("a_3 = 2, a_{37} = 19", "2, 19"),
            ("k = 45, n = 2", "n = 2, k = 45"), ("k = 45, n = 2", "45, 2"), ("x = 2, y = 1", "(2,1)"),
            ("x_1 = 1, x_2 = 2", "2, 1"), ("x = 1, x = 2", "2, 1"), ("2, 45", "k = 45, n = 2"),
        ],
        [
            ("a_3 = 2, a_{37} = 19", "a_3 = 19, a_{37} = 2"), ("a_3 = 2, a_{37} = 19", "19, 2"),
            ("a_3 = 2, a_{37} = 19", "a_{37} = 19"), ("k = 45, n = 2", "2, 45"), ("k = 45, n = 2", "k = 2, n = 45"),
            ("x = 2, y = 1", "(1,2)"), ("m = 1, n = 0", "0, 1"), ("x = 1", "y = 1"),
        ],
    ),
    "ratios": (
        [("V_1:V_2 = 11:21", "11:21"), ("11:21", "V_{1}:V_{2} = 11:21"), ("S_{MBCN}:S = 7:32", "7:32")],
        [("V_1:V_2 = 11:21", "21:11"), ("V_1:V_2 = 11:21", "V_2:V_1 = 11:21"), ("V_1:V_2 = 11:21", "11:22")],
    ),
    "letters alone": (
        [("xy", "yx"), ("bi", "ib"), ("2xyz", "2zyx"), ("abc", r"a \cdot c \cdot b"), ("ABC", "abc"), (r"\text{abc}", "abc")],
        [("abc", "cab"), ("xyz", "zyx"), ("ABCD", "DCBA"), (r"\text{abc}", "cab"), ("abc", "c a b"), ("no", "on")],
    ),
    "digits of other scripts": (
        [("42", "\uff14\uff12"), ("-0.5", "\uff0d\uff10\uff0e\uff15"), ("(1,2)", "\uff08\uff11\uff0c\uff12\uff09"),
         ("42", "\u0664\u0662"), ("\uff14\uff12", "42")],
        [("42", "\uff14\uff13"), ("12", "\uff11 \uff12"), ("2", "x\u00b2")],
    ),
    "two answers": (
        [("42, 43", "42 or 43"), ("5", "5, 5")],
        [("42", "42 or 43"), ("43", "42 or 43"), ("42", "42, 43"), ("2", r"\pm 2"), (r"\pm 2", "2")],
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
    [("B", "A"), ("B", "A or B"), ("B", r"A} or \boxed{B"), ("B", "5")],
)


# gold, response: lists of boxes, right and wrong
LISTED = (
    [
        ("(2,2),(6,2)", r"$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$"),
        ("1, -2", r"\[ \boxed{-2} \quad \text{and} \quad \boxed{1}. \]"),
        ("k = 45, n = 2", r"$\boxed{k = 45} \quad \text{and} \quad \boxed{n = 2}$"),
        ("k = 45, n = 2", r"$n = \boxed{2}$ and $k = \boxed{45}$"),
        ("k = 45, n = 2", r"\boxed{45} and \boxed{2}"),
        ("y_{1}=2x^2+1, y_{2}=3x", r"\( y_1 = \boxed{1 + 2x^2} \) and \( y_2 = \boxed{3x} \)"),
        ("x_1 = 1, x_2 = 2", r"$x_1 = \boxed{1}$; $x_2 = \boxed{2}$"),
        ("(2,1)", r"$x = \boxed{2}$, $y = \boxed{1}$"),
        (r"\(\boxed{1}\) and \(\boxed{-2}\)", r"\boxed{-2, 1}"),
        (r"$\boxed{1}\boxed{2}$", r"\boxed{1,2}"),
        ("5", r"\boxed{4}, no: \boxed{5}"),
        ("5", r"\boxed{\boxed{5}}"),
        ("42", "The answer is 42 or so."),
    ],
    [
        ("(6,2)", r"$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$"),
        ("(2,2),(2,6)", r"$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$"),
        ("k = 45, n = 2", r"\boxed{k = 2} and \boxed{n = 45}"),
        ("k = 45, n = 2", r"$n = \boxed{45}$ and $k = \boxed{2}$"),
        ("k = 45, n = 2", r"\boxed{2} and \boxed{45}"),
        ("x = 2, y = 1", r"$x = \boxed{1}$ and $y = \boxed{2}$"),
        ("2", r"\(x = \boxed{1}\) or \(x = \boxed{2}\)"),
        ("5", r"\boxed{4}\boxed{5}"),
        ("5", r"\boxed{4}; \boxed{5}"),
        ("12, 14", r"\boxed{12} is the area. Next: \boxed{14}"),
        ("42", "The answer is 42 or 43."),
        ("43", "The answer is 42 or 43."),
    ],
)


def verdicts(verifier, pairs):
    items = [
        (Problem(id=str(i), prompt="", answer=gold), rf"So \boxed{{{said}}}.") for i, (gold, said) in enumerate(pairs)
    ]
    return verifier.score(items)


def check_pairs(verifier, right, wrong):
    scores = verdicts(verifier, right + wrong)
    found = [score.value for score in scores]
    expected = [1.0] * len(right) + [0.0] * len(wrong)
    assert [p for p, f, e in zip(right + wrong, found, expected, strict=True) if f != e] == []
    assert {score.status for score in scores} <= {"ok", "no_answer"}


def test_lists_of_boxes(math_verifier):
    right, wrong = LISTED
    scores = math_verifier.score([(Problem("p", "", gold), text) for gold, text in right + wrong])
    found = {pair: score.value for pair, score in zip(right + wrong, scores, strict=True)}
    assert found == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize("form", MATH)
def test_forms(math_verifier, form):
    check_pairs(math_verifier, *MATH[form])


def test_multiple_choice_with_its_own_reward():
    with build_verifier("choice") as verifier:
        check_pairs(verifier, *CHOICE)
