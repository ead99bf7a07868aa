import pytest
import torch
from confident import confident

from luffy.api import Problem, ScoredGroup, ScoredTokens, load_config
from luffy.types import Group, Rollout, Score, Task


def rollout(task, prefix):
    nothing = torch.zeros(2)
    return Rollout(task, torch.tensor([5, 6]), prefix, nothing, nothing, nothing.bool(), "stop")


def test_confident():
    cfg = load_config("confident.yaml").algorithm
    task = Task(Problem(id="1", prompt="2+3", answer="5"), prompt_ids=(1, 2))
    group = Group(task, (rollout(task, 0), rollout(task, 2)), (Score(0.0), Score(1.0)))
    entropy = ScoredTokens(entropy=torch.tensor([0.0, 1.0]))
    own, trace = confident(ScoredGroup(group, torch.tensor([0.0, 1.0]), [entropy, entropy]), cfg)
    assert own.sft_weights.tolist() == [0.0, 0.0] and own.rl_weights.tolist() == [1.0, 1.0]
    assert trace.sft_weights.tolist() == pytest.approx([1.0, 0.36788], abs=1e-5)
