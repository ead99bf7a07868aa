"""Importance weights of tokens that were not drawn from the policy as the trainer computes it.

Three causes: a second model that overrides tokens, an engine whose probabilities differ from the trainer's, and a
rollout made with older weights (async.max_staleness, rollout.max_tokens_per_step). What the token was drawn with is
known, so the correction needs no teacher probability taken as 1: the weight of a token is p_old / p_behaviour, and the
expectation of weight * f is the policy's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Importance:
    """How weights are bounded and used.

    ``decoupled`` (default): the ratio is p / p_old, clipped as ever, and the advantage is multiplied by the weight.
    ``literal``: the ratio is p / p_behaviour AND the advantage is multiplied by the weight, as the note that
    introduced the idea has it; that corrects twice, and its gradient is not the policy's.

    ``level`` "token": every token has its own weight, as ratios in PPO; low variance, and a bias, since neither the
    tokens before nor those after it are corrected. "sequence": every token has the product over its response; no
    bias, and a variance that grows with the response's length.

    ``mask``: weights outside the bounds become 0 instead of the bound, which drops their tokens from
    the policy gradient.
    """

    clamp_min: float = 0.0
    clamp_max: float = 10.0
    detach: bool = True
    literal: bool = False
    level: Literal["token", "sequence"] = "token"
    mask: bool = False

    def weights(self, old_log_prob: Tensor, behavior_log_prob: Tensor, lengths: Sequence[int]) -> Tensor:
        """[R], of responses laid end to end, ``lengths`` tokens each."""
        log_weights = old_log_prob - behavior_log_prob
        if self.level == "sequence":
            # A reward belongs to the whole response, so the tokens after t need their correction as those before.
            log_weights = torch.cat([part.sum().expand_as(part) for part in log_weights.split(list(lengths))])
        weights = log_weights.exp()
        if self.mask:
            weights = torch.where((weights >= self.clamp_min) & (weights <= self.clamp_max), weights, 0.0)
        else:
            weights = weights.clamp(self.clamp_min, self.clamp_max)
        return weights.detach() if self.detach else weights

    def ratio_base(self, old_log_prob: Tensor, behavior_log_prob: Tensor) -> Tensor:
        """What the on-policy ratio divides by."""
        return behavior_log_prob if self.literal else old_log_prob
