"""The verifier on real data: every gold against itself in a box, and none against another one."""

import os
from pathlib import Path

import pytest

from luffy.evaluation.benchmarks import load_suite, read_choices
from luffy.rewards import build_verifier
from luffy.rewards.math import normalise
from studies.paper.golds import check_golds

DATA = Path(os.environ.get("LUFFY_DATA", "/nowhere"))

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="LUFFY_DATA does not name the data folder")

# docs/results/verifier.md says why
READ_AS_TEXT = {"minerva:27", "minerva:269"}


def test_sizes_and_order_of_the_papers_benchmarks():
    suite = load_suite("math6", DATA)
    sizes = {b.title: (len(b.problems), b.k, b.repeats) for b in suite.benchmarks}
    assert list(sizes.items()) == [
        ("AIME24", (30, 32, 32)), ("AIME25", (30, 32, 32)), ("AMC", (83, 32, 32)),
        ("MATH-500", (500, 1, 1)), ("Minerva", (272, 1, 1)), ("Olympiad", (675, 1, 1)),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math6", "ood", "gsm8k"])
def test_every_gold_verifies_against_itself(name):
    pytest.importorskip("math_verify", reason="the math reward needs Math-Verify")
    checks = list(check_golds(load_suite(name, DATA)))
    assert [failure for check in checks for failure in check.failed] == []
    assert {item for check in checks for item, _ in check.text_only} <= READ_AS_TEXT


@pytest.mark.slow
def test_every_training_gold_of_gsm8k():
    [check] = check_golds(load_suite(str(DATA / "gsm8k/train.jsonl"), reward="gsm8k"))
    assert check.checked == 7473 and check.failed == ()


@pytest.mark.slow
def test_a_gold_is_not_right_for_its_neighbour():
    """A verifier that says yes to all would pass every test above. Equal values written apart are fine."""
    pytest.importorskip("math_verify", reason="the math reward needs Math-Verify")
    problems = [p for b in load_suite("math6", DATA).benchmarks for p in b.problems]
    pairs = [
        (a, b)
        for a, b in zip(problems, problems[1:] + problems[:1], strict=True)
        if normalise(a.answer) != normalise(b.answer)
    ]
    with build_verifier("math") as verifier:
        scores = verifier.score([(a, rf"\boxed{{{b.answer}}}") for a, b in pairs])
    alike = {(a.answer, b.answer) for (a, b), score in zip(pairs, scores, strict=True) if score.value}
    assert alike <= {("5", "x=5"), ("x=5", "5")}


def test_shuffled_options_are_the_files_own():
    plain = load_suite("ood", DATA, shuffle=False).benchmarks[0].problems
    mixed = load_suite("ood", DATA, seed=1).benchmarks[0].problems
    assert len(plain) == 1172
    moved = 0
    for before, after in zip(plain, mixed, strict=True):
        one, other = (read_choices(str(p.prompt), p.answer, p.id) for p in (before, after))
        assert one.stem == other.stem and sorted(one.options) == sorted(other.options)
        assert one.options[one.gold] == other.options[other.gold]
        moved += before.answer != after.answer
    assert 0.6 < moved / 1172 < 0.85  # a fair shuffle of four moves three golds of four
