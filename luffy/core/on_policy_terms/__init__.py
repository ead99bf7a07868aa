"""The policy-gradient term of on-policy tokens (``algorithm.on_policy_term``), one file each; PPO's is here.

A term is a function of ``OnPolicyTokens`` that returns the loss of each token and which tokens the clip touched:

    @ON_POLICY_TERMS.register("cispo")
    def cispo(tokens): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.core.shaping import Shape
from luffy.registry import Part, Registry


@dataclass(frozen=True)
class OnPolicyTerm(Part):
    """``shapes``: it takes ``algorithm.on_policy_reshape``."""

    shapes: bool = False


ON_POLICY_TERMS: Registry[OnPolicyTerm] = Registry("on-policy term", OnPolicyTerm, home="luffy.core.on_policy_terms")


@dataclass(frozen=True, eq=False)
class OnPolicyTokens:
    """What a term sees, in the shape of ``log_prob``. ``counted``: tokens that have this term; those of a response are
    ``lengths`` neighbours of a packed row, or without lengths a row of a padded batch. ``low`` and ``high`` bound the
    ratio; None: no clip."""

    log_prob: Tensor
    old: Tensor
    advantages: Tensor
    counted: Tensor
    lengths: Sequence[int] | None = None
    low: float | None = 0.8
    high: float | None = 1.2
    shape: Shape = Shape()

    def clip(self, ratio: Tensor) -> Tensor:
        return ratio if self.low is None and self.high is None else ratio.clamp(self.low, self.high)


def clipped_surrogate(tokens: OnPolicyTokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """-min(A r, A clip(r)), and where the clip made it larger."""
    plain = -tokens.advantages * ratio
    if tokens.low is None and tokens.high is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = -tokens.advantages * tokens.clip(ratio)
    return torch.maximum(plain, clipped), clipped > plain


@ON_POLICY_TERMS.register("ppo", shapes=True)
def ppo(tokens: OnPolicyTokens) -> tuple[Tensor, Tensor]:
    """PPO: the clipped ratio p / p_old of each token, or a shape of it."""
    return clipped_surrogate(tokens, tokens.shape.on_policy(tokens.log_prob, tokens.old))
