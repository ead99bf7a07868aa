"""The policy-gradient term of on-policy tokens (``algorithm.on_policy_term``).

A term is a function of ``OnPolicyTokens`` that returns the loss of each token and which tokens the clip touched:

    @ON_POLICY_TERMS.register("cispo")
    def cispo(tokens): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.core.masked import response_means
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


@ON_POLICY_TERMS.register("cispo")
def cispo(tokens: OnPolicyTokens) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585), -sg(clip(r)) A log p: a token outside the bounds keeps a gradient, of the
    size at the bound."""
    ratio = torch.exp(tokens.log_prob.detach() - tokens.old)
    weight = tokens.clip(ratio).detach()
    return -weight * tokens.advantages * tokens.log_prob, weight != ratio


@ON_POLICY_TERMS.register("gspo")
def gspo(tokens: OnPolicyTokens) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv 2507.18071): PPO's term with s = exp(mean of log p - log p_old) over the response's tokens, at each
    of them; the gradient flows through the mean, so the clip drops a whole response or none of it."""
    ratio = torch.exp(response_means(tokens.log_prob - tokens.old, tokens.counted, tokens.lengths))
    return clipped_surrogate(tokens, ratio)
