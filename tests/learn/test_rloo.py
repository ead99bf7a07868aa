"""RLOO: closed forms, with traces treated as for any other estimator."""

import pytest
import torch

from luffy.config import AlgorithmConfig, load_config
from luffy.errors import ConfigError
from luffy.learn.credit import ScoredTokens, credit
from luffy.types import Group, Problem, Rollout, Score, Task

TASK = Task(Problem(id="p", prompt="2+3", answer="5"), prompt_ids=(1, 2))


def rollout(length, prefix=0):
    nothing = torch.zeros(length)
    return Rollout(TASK, torch.arange(length), prefix, nothing, nothing, nothing.bool(), "stop")


def rloo_advantages(rollouts, rewards, **algorithm):
    group = Group(TASK, tuple(rollouts), tuple(Score(reward) for reward in rewards))
    (samples,) = credit([group], [[ScoredTokens()] * len(rollouts)], AlgorithmConfig(**algorithm))
    return samples


def test_the_others_make_the_baseline():
    samples = rloo_advantages([rollout(2)] * 4, [1.0, 0.0, 0.0, 1.0], credit="rloo")
    assert [s.advantages.tolist() for s in samples] == [
        pytest.approx([a, a]) for a in (2 / 3, -2 / 3, -2 / 3, 2 / 3)
    ]  # fmt: skip


def test_the_longest_response_loses_the_penalty():
    cfg = {"credit": {"name": "rloo", "length_penalty": 0.5}}
    long, short = rloo_advantages([rollout(4), rollout(2)], [1.0, 1.0], **cfg)
    assert long.advantages[0].item() == pytest.approx(-0.25) and short.advantages[0].item() == pytest.approx(0.25)


def test_baseline_and_traces_are_parts_of_their_own():
    """The estimator changes neither which samples make the baseline nor what happens to a trace."""
    group = [rollout(2, prefix=2), rollout(2), rollout(2)]
    trace, *own = rloo_advantages(
        group, [1.0, 1.0, 0.0], credit="rloo", advantage="grpo_split", trace_advantage="constant"
    )
    assert trace.advantages.tolist() == [1.0, 1.0]
    assert [s.advantages[0].item() for s in own] == [1.0, -1.0]
    trace, *own = rloo_advantages(group, [1.0, 1.0, 0.0], credit="rloo", trace_term="sft")
    assert trace.sft_weights.tolist() == [1.0, 1.0] and trace.rl_weights.tolist() == [0.0, 0.0]
    assert [s.advantages[0].item() for s in own] == [1.0, -1.0]
    plain = rloo_advantages([rollout(1), rollout(1)], [1.0, 0.0], credit="rloo")[0].advantages.item()
    over_std = rloo_advantages([rollout(1), rollout(1)], [1.0, 0.0], credit="rloo", normalize_std=True)[
        0
    ].advantages.item()
    assert over_std == pytest.approx(plain / (0.5**0.5 + 1e-6))


def test_the_recipe_and_its_setting_on_the_command_line():
    cfg = load_config("tiny/rloo", ["algorithm.credit.length_penalty=0.2"])
    assert cfg.algorithm.credit.shown == "rloo (length_penalty 0.2)" and cfg.guidance.n_prefix == 0
    assert load_config({"algorithm": {"credit": "rloo"}}).algorithm.credit.settings.length_penalty == 0.0
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.credit\.lenght_penalty' \(did you mean"):
        load_config("tiny/rloo", ["algorithm.credit.lenght_penalty=0.2"])
