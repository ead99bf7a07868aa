"""Values of the math reward, and the batch of hostile inputs that must not disturb the honest ones."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from adversarial_inputs import RESPONSES

from luffy.rewards import math as math_reward
from luffy.rewards.math import as_boxed, normalise, same_text, undress
from luffy.types import Problem

pytest.importorskip("math_verify", reason="the math reward needs Math-Verify")


def test_the_limit_on_a_formula_never_covers_an_import():
    """A worker's start imports all that scoring needs: an import takes seconds on a busy machine, a formula has two."""
    code = (
        "import sys; from luffy.rewards.math import load; from test_math import RIGHT; score = load()\n"
        "before = set(sys.modules)\n"
        "assert all(score(gold, text) == (1.0, 'ok') for gold, text in RIGHT)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_limit_is_on_cpu_time(monkeypatch):
    """Waiting costs nothing, computing does: a busy machine changes no score."""
    from math_verify.errors import TimeoutException

    monkeypatch.setattr(math_reward, "LIMIT_S", 0.2)
    with math_reward._cpu_limit():
        time.sleep(0.5)
    with pytest.raises(TimeoutException), math_reward._cpu_limit():
        while True:
            pass


def score_all(verifier, pairs):
    return verifier.score([(Problem(id=str(i), prompt="", answer=gold), text) for i, (gold, text) in enumerate(pairs)])


RIGHT = [
    ("5", r"\boxed{5}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac{1}{2}", r"\boxed{\dfrac12}"),
    ("1/2", r"\boxed{\frac{2}{4}}"),
    (r"50\%", r"\boxed{0.5}"),
    ("50%", r"\boxed{50\%}"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\pi/2)}"),
    ("x=3", r"\boxed{3}"),
    ("3", r"\boxed{x = 3}"),
    ("A", r"\boxed{A}"),
    ("A", r"\boxed{\text{A}}"),
    ("$5$", r"\boxed{5}"),
    (r"\boxed{5}", r"$\boxed{5.0}$"),
    ("1,234", r"\boxed{1234}"),
    ("1e3", r"\boxed{1000}"),
    ("2.5e-3", r"\boxed{0.0025}"),
    ("007", r"\boxed{7}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    (r"\{1,2\}", r"\boxed{\{2, 1\}}"),
    ("1,2", r"$x = \boxed{1}$ or $x = \boxed{2}$"),
    (r"10^\circ", r"\boxed{10}"),
    (r"\text{Evelyn}", r"\boxed{Evelyn}"),
    ("Evelyn", r"\boxed{\text{evelyn}}"),
    (r"6\frac{1}{2}", r"\boxed{6.5}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}"),
    (r"(-\infty,2]", r"\boxed{x \le 2}"),
    (r"(-\infty,-1]\cup[2,\infty)", r"\boxed{x \le -1 \text{ or } x \ge 2}"),
    (r"(-\infty,0)\cup(0,\infty)", r"\boxed{x \neq 0}"),
    ("k = 45, n = 2", r"\boxed{45, 2}"),
    ("V_1:V_2 = 11:21", r"\boxed{11:21}"),
    ("12", "The final answer is $12$."),
    ("12", "So the answer is 12"),
    ("5", "x" * 10_000 + r" \boxed{5}"),
    ("5", r"first \boxed{4}, but after checking: \boxed{5}"),
]

WRONG = [
    ("1", r"\boxed{2}"),
    ("5", r"\boxed{5} is tempting, but no: \boxed{6}"),
    ("2", r"\boxed{1} or \boxed{2}"),
    ("0.5", r"\boxed{0.05}"),
    ("Evelyn", r"\boxed{nylevE}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("x^2", r"\boxed{x^3}"),
    ("12", r"\boxed{1 2}"),
]

SILENT = [("5", "nothing here"), ("5", ""), ("5", r"\boxed{}"), ("5", r"\boxed{5}" + " pad" * 2000)]


def test_values(math_verifier):
    scores = score_all(math_verifier, RIGHT)
    assert [pair for pair, score in zip(RIGHT, scores, strict=True) if (score.value, score.status) != (1.0, "ok")] == []
    scores = score_all(math_verifier, WRONG)
    assert [pair for pair, score in zip(WRONG, scores, strict=True) if (score.value, score.status) != (0.0, "ok")] == []
    scores = score_all(math_verifier, SILENT)
    assert [(score.value, score.status) for score in scores] == [(0.0, "no_answer")] * len(SILENT)


def test_an_empty_gold_is_an_error_and_never_right(math_verifier, caplog):
    [score] = score_all(math_verifier, [("", r"\boxed{}")])
    assert (score.value, score.status) == (0.0, "error")
    assert "finds no answer in the gold ''" in caplog.text


def check_hostile(verifier, hostile):
    """Each hostile response between two honest ones: one needs no parser, one needs sympy."""
    pairs = []
    for number, response in enumerate(hostile):
        equal = rf"\boxed{{\frac{{{2 * number}}}{{14}}}}"
        pairs += [("-31337.5", response), (str(number), rf"so \boxed{{{number}}}"), (f"{number}/7", equal)]
    scores = score_all(verifier, pairs)
    assert {score.value for score in scores[0::3]} == {0.0}
    assert "timeout" in {score.status for score in scores[0::3]}
    assert {(score.value, score.status) for score in scores[1::3] + scores[2::3]} == {(1.0, "ok")}


def test_a_sample_of_hostile_inputs(math_verifier):
    check_hostile(math_verifier, RESPONSES[::8])


@pytest.mark.slow
def test_all_hostile_inputs(math_verifier):
    assert len(RESPONSES) >= 44
    check_hostile(math_verifier, RESPONSES)


def test_text_shortcut_is_exact():
    assert same_text(r" \left( 3, \dfrac{\pi}{2} \right) ", r"(3,\frac{\pi}{2})")
    assert same_text("$x$", "x")
    assert not same_text("1 2", "12")
    assert not same_text("", "")
    assert not same_text(r"\leftarrow", "arrow")
    assert normalise(r"3\, \text{a b}.") == r"3\text{a b}"


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("yes", "eys", 0.0), ("yes", "yes", 1.0), ("odd", "ddo", 0.0), ("two", "tow", 0.0), ("no", "on", 0.0),
        ("all", "lla", 0.0), ("even", "neve", 0.0),
    ],
)  # fmt: skip
def test_an_anagram_of_a_short_word_is_wrong(math_verifier, gold, answer, expected):
    (score,) = math_verifier.score([(Problem("p", "?", gold), rf"\boxed{{{answer}}}")])
    assert (score.value, score.status) == (expected, "ok")


@pytest.mark.parametrize(
    "box", [r"\boxed{3\ }", r"\boxed{ \ 3 \ \  }", r"\boxed{3~}", r"\boxed{3\,}", "\\boxed{3\\\n}"]
)
def test_spaces_of_latex_around_an_answer(math_verifier, box):
    (score,) = math_verifier.score([(Problem("p", "?", "3"), box)])
    assert (score.value, score.status) == (1.0, "ok")


def test_rewriting_for_the_parser():
    assert undress("$$x$$") == "x"
    assert undress(r"\(x\)") == "x"
    assert undress("$x$ or $y$") == "$x$ or $y$"
    assert as_boxed("-1.5e+3") == r"\boxed{-1.5 \cdot 10^{3}}"
    assert as_boxed("odd") == r"\boxed{odd}"
    assert as_boxed("even") == r"\boxed{\text{even}}"
