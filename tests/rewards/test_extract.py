import time

import pytest

from luffy.rewards.extract import boxed_answer, last_boxed, plain, tail


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} wait, no: \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{3}", "3"),
        (r"stray } and { then \boxed {4}", "4"),
        (r"\boxed{8} and then cut off \boxed{\frac{1}{", "8"),
        (r"\boxed{}", ""),
        (r"\boxed{cut", None),
        ("no box", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    box = last_boxed(text)
    assert (box.content if box else None) == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1, 2"),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1, 2, 3"),
        (r"\boxed{5}, \boxed{5}", "5"),
        (r"\boxed{1} is wrong, it is \boxed{2}", "2"),
        ("\\boxed{1}\n\n\\boxed{2}", "2"),
        (r"\boxed{1}\boxed{2}", "1, 2"),
        (r"\boxed{1} \quad \text{and} \quad \boxed{2}", "1, 2"),
        (r"\(\boxed{1}\); \(\boxed{2}\)", "1, 2"),
        (r"$x=\boxed{1}$ and $y_2=\boxed{2}$", "x = 1, y_2 = 2"),
        (r"$x=\boxed{1}$ and \boxed{2}", "1, 2"),
        (r"$f(x)=\boxed{1}$ and $y=\boxed{2}$", "1, 2"),
        (r"$x=\boxed{a=1}$ and $y=\boxed{2}$", "a=1, 2"),
    ],
)
def test_listed_boxes_are_one_answer(text, answer):
    assert boxed_answer(text) == answer


def test_finding_boxes_is_linear():
    started = time.process_time()
    for text in ["\\boxed{" * 585, "\\boxed{1}, " * 370, "{" * 4096, "\\" * 4096]:
        boxed_answer(text)
    assert time.process_time() - started < 2  # of work, however busy the machine is


def test_plain_characters():
    assert plain("\uff14\uff12\u3000\uff08\uff21\uff0c\uff1d\uff09 \u0664 \u4e8c \u00b2") == "42 (A,=) 4 \u4e8c \u00b2"
    assert plain("42") == "42"


def test_tail_keeps_the_last_4096_characters():
    assert tail("a" + "b" * 4096) == "b" * 4096
    assert tail("short") == "short"
