"""Group baselines: how good a response is beside the others of its problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def group_advantages(
    scores: Tensor,
    index: Sequence[Hashable],
    in_baseline: Tensor,
    *,
    use_std: bool,
    epsilon: float = 1e-6,
) -> Tensor:
    """Score minus the group's baseline, over its spread when ``use_std``.  scores, in_baseline: [B]

    Mean and unbiased std are taken over the samples ``in_baseline``: all of them is the paper's
    Eq. 4 (``grpo``); the on-policy ones alone is ``grpo_split``. One such sample alone: mean 0, std 1.
    Equal rewards have an advantage of exactly 0. ``index`` has one group key a score.
    """
    if not len(index) == len(in_baseline) == len(scores):
        raise ValueError(
            f"rewards of {len(scores)} rows need as many entries in the others: "
            f"got {len(index)} group keys and {len(in_baseline)} on-policy flags"
        )
    if len(set(index)) == 1:
        return _over_baseline(scores, in_baseline, index[0], use_std, epsilon)
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, key in enumerate(index):
        members[key].append(row)
    advantages = torch.empty_like(scores)
    sizes = {len(rows) for rows in members.values()}
    if len(sizes) == 1 and min(sizes) > 1 and in_baseline.all():  # the usual case, hundreds of groups at once
        places = torch.tensor(list(members.values()), device=scores.device)
        advantages[places] = _over_own_baselines(scores[places], use_std, epsilon)
        return advantages
    for key, rows in members.items():
        advantages[rows] = _over_baseline(scores[rows], in_baseline[rows], key, use_std, epsilon)
    return advantages


def _over_baseline(scores: Tensor, in_baseline: Tensor, key: Hashable, use_std: bool, epsilon: float) -> Tensor:
    """Scores of one group minus the mean of those in the baseline; ``key`` names the group in errors."""
    counted = in_baseline.bool()
    baseline = scores if counted.all() else scores[counted]
    if baseline.numel() == 0:
        raise ValueError(f"group {key!r} has no on-policy sample to take a baseline from")
    mean, std = _mean_std(baseline)
    return (scores - mean) / (std + epsilon) if use_std else scores - mean


def group_spread(scores: Tensor, in_baseline: Tensor, epsilon: float = 1e-6) -> Tensor:
    """The standard deviation that ``group_advantages`` divides by, of one group."""
    return _mean_std(scores[in_baseline.bool()])[1] + epsilon


def _over_own_baselines(scores: Tensor, use_std: bool, epsilon: float) -> Tensor:
    """[G, n] -> [G, n]: each row over the baseline of all its scores, with the bits of ``_over_baseline``."""
    first = scores[:, :1]
    equal = (scores == first).all(dim=1, keepdim=True)
    mean = torch.where(equal, first, scores.mean(dim=1, keepdim=True))
    std = _std(scores, mean)
    return (scores - mean) / (torch.where(equal | (std == 0), 1.0, std) + epsilon) if use_std else scores - mean


def _mean_std(values: Tensor) -> tuple[Tensor, Tensor]:
    if values.numel() == 1:
        return values.new_zeros(()), values.new_ones(())
    if len(set(values.tolist())) == 1:  # the mean of equal values may be rounded, and so may their spread
        return values[0], values.new_ones(())
    mean = values.mean()
    std = _std(values, mean)[0]
    return mean, torch.where(std == 0, torch.ones_like(std), std)


def _std(values: Tensor, mean: Tensor) -> Tensor:
    """Unbiased, of the last dimension, which stays with length 1. `Tensor.std` rounds a row alone otherwise than the
    same row among others; this does not."""
    return ((values - mean).square().sum(dim=-1, keepdim=True) / (values.shape[-1] - 1)).sqrt()


def compute_grpo_outcome_advantage_split(
    token_level_rewards: Tensor,
    eos_mask: Tensor,
    index: Sequence[Hashable],
    on_policy_mask: Tensor,
    epsilon: float = 1e-6,
    use_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """GRPO advantages with the baseline of on-policy samples only; returns (advantages, returns).

    token_level_rewards, eos_mask: [B, T]; index: B group keys; on_policy_mask: [B].
    Off-policy samples are normalised with the on-policy statistics too.
    """
    with torch.no_grad():
        scores = token_level_rewards.sum(dim=-1)
        keys = index.tolist() if isinstance(index, Tensor) else index
        per_sample = group_advantages(scores, keys, on_policy_mask, use_std=use_std, epsilon=epsilon)
        advantages = per_sample.unsqueeze(-1) * eos_mask
    return advantages, advantages
