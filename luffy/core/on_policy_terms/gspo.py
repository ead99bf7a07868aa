"""GSPO (arXiv 2507.18071): one ratio for a response, the geometric mean of those of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from luffy.core.masked import response_means
from luffy.core.on_policy_terms import ON_POLICY_TERMS, OnPolicyTokens, clipped_surrogate


@ON_POLICY_TERMS.register("gspo")
def gspo(tokens: OnPolicyTokens) -> tuple[Tensor, Tensor]:
    """PPO's term with s = exp(mean of log p - log p_old) over the response's tokens, at each of them; the gradient
    flows through the mean, so the clip drops a whole response or none of it."""
    ratio = torch.exp(response_means(tokens.log_prob - tokens.old, tokens.counted, tokens.lengths))
    return clipped_surrogate(tokens, ratio)
