"""Weights of tokens in the SFT term (``algorithm.sft_weight``).

A weight is a function of ``SftTokens`` that returns a factor of each token's loss, without a gradient; the denominator
counts tokens, whatever they weigh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.config.parts import SFT_WEIGHTS
from luffy.core.masked import response_means
from luffy.schema import knob


@dataclass(frozen=True, eq=False)
class SftTokens:
    """Response tokens of a micro-batch, [R]: log-probs of now, without a gradient, those in the SFT term (``counted``),
    and where the weight needs them log-probs under the reference model and entropies of the likeliest tokens, in 0 to
    1. ``lengths`` of the responses sum to R."""

    log_prob: Tensor
    counted: Tensor
    lengths: Sequence[int]
    ref: Tensor | None = None
    top_entropy: Tensor | None = None


@SFT_WEIGHTS.register("none")
def none(tokens: SftTokens) -> Tensor:
    """1 everywhere."""
    return torch.ones_like(tokens.log_prob)


@dataclass(frozen=True)
class Eaft:
    top: int = knob(20, "likeliest tokens whose entropy counts", ge=2)


@SFT_WEIGHTS.register("eaft", settings=Eaft)
def eaft(tokens: SftTokens, settings: Eaft) -> Tensor:
    """EAFT (arXiv 2601.02151), tokens at which the policy is certain count less: the entropy of the ``top`` likeliest
    tokens, renormalised, over log ``top``: 0 if the policy is certain."""
    assert tokens.top_entropy is not None
    return tokens.top_entropy


@dataclass(frozen=True)
class IwSft:
    power: float = knob(1.0, "exponent of the ratio", ge=0)
    cap: float = knob(16.0, "largest weight", gt=0)


@SFT_WEIGHTS.register("iw_sft", settings=IwSft, needs_reference=True)
def iw_sft(tokens: SftTokens, settings: IwSft) -> Tensor:
    """iw-SFT (arXiv 2507.12856), traces that the policy has come to prefer over the reference count more:
    min((p / p_ref)^power, cap) of a whole trace, p / p_ref the geometric mean over its tokens."""
    assert tokens.ref is not None
    log_ratio = response_means(tokens.log_prob - tokens.ref, tokens.counted, tokens.lengths)
    return torch.exp(settings.power * log_ratio).clamp(max=settings.cap)
