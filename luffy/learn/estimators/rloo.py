"""RLOO (arXiv 2402.14740): reward minus the mean reward of the other responses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.config import AlgorithmConfig
from luffy.learn.credit import ScoredGroup, credit_function, in_baseline
from luffy.schema import knob


@dataclass(frozen=True)
class Rloo:
    length_penalty: float = knob(0.0, "reward that the longest response of a group loses; others in proportion", ge=0)


@credit_function("rloo", settings=Rloo, sft_term=False, follows_trace_term=True)
def rloo(group: ScoredGroup, cfg: AlgorithmConfig, settings: Rloo) -> Tensor:
    """[n]: the reward of each response minus the mean of the others in the baseline (``algorithm.advantage``)."""
    lengths = torch.tensor([float(rollout.length) for rollout in group.rollouts])
    rewards = group.rewards - settings.length_penalty * lengths / lengths.max()
    counted = in_baseline(group.rollouts, cfg).float()
    others = (rewards * counted).sum() - rewards * counted
    return rewards - others / (counted.sum() - counted).clamp(min=1)
