"""CISPO (MiniMax-M1, arXiv 2506.13585): the clipped ratio is a constant weight of log p."""

from __future__ import annotations

import torch
from torch import Tensor

from luffy.core.on_policy_terms import ON_POLICY_TERMS, OnPolicyTokens


@ON_POLICY_TERMS.register("cispo")
def cispo(tokens: OnPolicyTokens) -> tuple[Tensor, Tensor]:
    """-sg(clip(r)) A log p: a token outside the bounds keeps a gradient, of the size at the bound."""
    ratio = torch.exp(tokens.log_prob.detach() - tokens.old)
    weight = tokens.clip(ratio).detach()
    return -weight * tokens.advantages * tokens.log_prob, weight != ratio
