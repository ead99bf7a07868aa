"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (k1, k2, k3)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, estimator: str) -> Tensor:
    """Per token. k1 is unbiased and may be negative; k2 has low variance; k3 is unbiased and >= 0."""
    log_ratio = log_prob - ref_log_prob
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return torch.exp(-log_ratio) - 1 + log_ratio
    raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
