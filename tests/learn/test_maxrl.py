"""MaxRL: the gradient of its formula, and what is refused."""

import pytest
import torch
from published import L, assert_gradient_is

from luffy.config import AlgorithmConfig, load_config
from luffy.errors import ConfigError
from luffy.learn.credit import ScoredTokens, credit
from luffy.types import Group, Problem, Rollout, Score, Task

TASK = Task(Problem(id="p", prompt="2+3", answer="5"), prompt_ids=(1, 2))


@pytest.mark.parametrize("rewards", [(1, 0, 0, 0), (1, 1, 0, 1), (1, 0.5, 0, 0)])
def test_the_gradient_of_the_formula(rewards):
    def published(log_p, old, ref, teacher):
        mean, total = sum(rewards) / 4, 0
        for reward, p, o in zip(rewards, log_p, old, strict=True):
            a, r = (reward - mean) / mean, torch.exp(p - o)
            total = total - torch.minimum(a * r, a * r.clamp(0.8, 1.2)).sum()
        return total / (4 * L)

    assert_gradient_is("maxrl", published, rewards=rewards)


@pytest.mark.parametrize("rewards", [(0.0, 0.0), (1.0, -1.0), (1.0, -2.0)])
def test_without_a_mean_above_0_there_is_no_advantage(rewards):
    rollouts = tuple(
        Rollout(TASK, torch.arange(2), 0, *[torch.zeros(2)] * 2, torch.zeros(2).bool(), "stop") for _ in rewards
    )
    group = Group(TASK, rollouts, tuple(map(Score, rewards)))
    (samples,) = credit([group], [[ScoredTokens()] * 2], AlgorithmConfig(credit="maxrl"))
    assert [s.advantages.tolist() for s in samples] == [[0.0, 0.0]] * 2


def test_what_would_divide_twice_or_by_less_than_0_is_refused():
    with pytest.raises(ConfigError, match=r"divides the advantages itself.*set algorithm\.normalize_std=false"):
        load_config("tiny/maxrl", ["algorithm.normalize_std=true"])
    with pytest.raises(ConfigError, match=r"divides by the mean reward.*set algorithm\.kl_in=loss"):
        load_config("tiny/maxrl", ["algorithm.kl_in=reward", "algorithm.kl_coef=0.1"])
