"""Reward functions of the installed TRL, as they are, as luffy's rewards."""

import pytest

trl_rewards = pytest.importorskip("trl.rewards", reason="TRL is not installed: make test-integrations")

from luffy.rewards.kinds import Answered  # noqa: E402
from luffy.rewards.own_function import OwnFunction  # noqa: E402
from luffy.types import Message, Problem  # noqa: E402


def item(text, tokens):
    problem = Problem("p", (Message("user", "2+3?"),), "5", meta={"solution": "$5$"})
    return Answered(problem, text, list(range(tokens)))


@pytest.mark.parametrize(
    ("function", "scores"),
    [
        (trl_rewards.accuracy_reward, [1.0, 0.0]),
        (trl_rewards.think_format_reward, [1.0, 0.0]),
        (trl_rewards.reasoning_accuracy_reward, [1.0, 0.0]),
        (trl_rewards.get_soft_overlong_punishment(100, 20), [-0.75, 0.0]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_of_trls(function, scores):
    own = OwnFunction(function.__name__, function, timeout_s=8.0)
    items = [item("<think>\n2+3\n</think>\n$\\boxed{5}$", 95), item("$\\boxed{6}$", 1)]
    assert own.form.batch
    assert [outcome.value for outcome in own.outcomes(items)] == [(score, "ok") for score in scores]
