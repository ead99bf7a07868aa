"""CISPO: the gradient of its formula; no token loses it."""

import torch
from published import assert_gradient_is

from luffy.config import load_config


def test_the_gradient_of_the_formula():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    def published(log_p, old, ref, teacher):
        total = 0
        for a, p, o in zip(advantages, log_p, old, strict=True):
            weight = torch.exp(p - o).clamp(1 - 0.1, 1 + 0.2).detach()
            total = total - (weight * a * p).sum()
        return total / (5 + 3 + 4 + 2)

    clip = ["algorithm.clip_ratio=0.1", "algorithm.clip_ratio_high=0.2"]
    gradient = assert_gradient_is("cispo", published, rewards=rewards.tolist(), overrides=clip)
    assert all((g != 0).all() for g in gradient)


def test_the_recipe_bounds_the_ratio_from_above_alone():
    loss = load_config("small/cispo").algorithm.policy_loss()
    assert (loss.clip_low, loss.clip_high) == (0.0, 5.0)
