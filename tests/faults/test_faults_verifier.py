"""Two hundred hostile answers: each has its verdict in bounded time, and costs its neighbours nothing."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from adversarial_answers import GOLD, families
from processes import is_running

from luffy.rewards import build_verifier
from luffy.rewards.verifier import MathReward, Verifier
from luffy.types import Problem

TIMEOUT_S = 4.0
LISTED = 200


def hostile_answers(tmp_path) -> list[tuple[str, str]]:
    return [(family, text) for family, texts in families(str(tmp_path / "mark")).items() for text in texts]


def with_correct_neighbours(answers):
    """Each hostile answer between a plain correct one and one that needs the parser."""
    items = []
    for number, (_, text) in enumerate(answers):
        pairs = [
            (GOLD, text),
            (str(number), rf"so \boxed{{{number}}}"),
            (f"{number}/7", rf"\boxed{{\frac{{{2 * number}}}{{14}}}}"),
        ]
        items += [(Problem(id="p", prompt="?", answer=gold), said) for gold, said in pairs]
    return items


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_the_math_reward_outlives_them_all(tmp_path):
    pytest.importorskip("math_verify")
    answers = hostile_answers(tmp_path)
    assert len(answers) >= LISTED
    reward = MathReward(workers=2, timeout_s=TIMEOUT_S)
    started = time.monotonic()
    with Verifier({"math": reward}, {"math": 1.0}) as verifier:
        scores = verifier.score(with_correct_neighbours(answers))
        spent = time.monotonic() - started
        assert len(set(reward._pool.pids)) == 2 and all(map(is_running, reward._pool.pids))
    hostile, correct = scores[0::3], scores[1::3] + scores[2::3]
    print(f"\n{len(answers)} hostile answers: {dict(Counter(s.status for s in hostile))}, {spent:.0f} s in all")
    assert {s.value for s in hostile} == {0.0}
    assert {(s.value, s.status) for s in correct} == {(1.0, "ok")}
    assert spent < len(answers) * TIMEOUT_S
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", ["numeric", "gsm8k", "choice", "format"])
def test_rewards_of_this_process_are_quick_on_every_one(tmp_path, kind):
    """They cannot be killed, so none may be slow: CPU seconds, because the machine may be busy."""
    gold = {"choice": "C"}.get(kind, GOLD)
    slowest = 0.0
    with build_verifier(kind) as verifier:
        for family, text in hostile_answers(tmp_path):
            started = time.process_time()
            (score,) = verifier.score([(Problem(id="p", prompt="?", answer=gold), text)])
            took = time.process_time() - started
            slowest = max(slowest, took)
            assert took < 1.0, (family, text[:60])
            assert score.value in (0.0, 1.0) and score.status in ("ok", "no_answer"), (family, text[:60], score)
            assert score.value == 0.0 or kind in ("format", "choice"), (family, text[:60])
    print(f"\n{kind}: slowest {slowest * 1000:.0f} ms")
    assert not (tmp_path / "mark").exists()
