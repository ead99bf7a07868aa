import pytest
import torch
from loo import loo

from luffy.api import Problem, ScoredGroup, ScoredTokens, load_config
from luffy.types import Group, Rollout, Score, Task


def test_loo():
    task = Task(Problem(id="1", prompt="2+3", answer="5"), prompt_ids=(1, 2))
    rollouts = [
        Rollout(task, torch.zeros(n).long(), 0, *[torch.zeros(n)] * 2, torch.zeros(n).bool(), "stop") for n in (4, 2)
    ]
    group = ScoredGroup(Group(task, tuple(rollouts), (Score(1.0), Score(1.0))), torch.ones(2), [ScoredTokens()] * 2)
    assert loo(group, load_config("loo.yaml").algorithm).tolist() == pytest.approx([-0.05, 0.05], abs=1e-6)
