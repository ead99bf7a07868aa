from dataclasses import replace

import torch
from half_then_whole import half_then_whole

from luffy.api import FirstRound, Problem
from luffy.guidance import Planner, RatioSchedule
from luffy.types import Demonstration, Group, Rollout, Sampling, Score, Task


def test_half_then_whole():
    task = Task(Problem(id="1", prompt="2+3", answer="5"), (1, 2), (Demonstration((7, 8, 9, 4)),))
    nothing = torch.zeros(1)
    failed = Rollout(task, torch.tensor([5]), 0, nothing, nothing, nothing.bool(), "stop")
    planner = Planner(2, 0, Sampling(max_tokens=8), RatioSchedule(), "random", seed=0)
    group = Group(task, (failed, failed), (Score(0.0), Score(0.0)))
    first = FirstRound(group, 0, 0, 0, planner, lambda s: s >= 1, lambda s: s <= 0, lambda: [1.0])
    second = half_then_whole(first)
    assert second.keep == (0,) and second.add[0].request.prefix_ids == (7, 8)
    assert half_then_whole(replace(first, round=2)).add[0].request is None  # nothing to generate
    assert half_then_whole(replace(first, group=replace(group, scores=(Score(0.0), Score(1.0))))) is None
