"""MaxRL (arXiv 2602.02710): reward minus the group's mean, divided by that mean."""

from __future__ import annotations

import torch
from torch import Tensor

from luffy.config import AlgorithmConfig
from luffy.learn.credit import ScoredGroup, credit_function, in_baseline


@credit_function("maxrl", sft_term=False, follows_trace_term=True, scales=True)
def maxrl(group: ScoredGroup, cfg: AlgorithmConfig) -> Tensor:
    """[n]: (R - mean) / mean, with the mean of the baseline (``algorithm.advantage``); 0 if the mean is not above 0."""
    mean = group.rewards[in_baseline(group.rollouts, cfg)].mean()
    return (group.rewards - mean) / mean if mean > 0 else torch.zeros_like(group.rewards)
