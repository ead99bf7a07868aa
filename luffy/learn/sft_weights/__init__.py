"""Weights of tokens in the SFT term (``algorithm.sft_weight``), one file each.

A weight is a function of ``SftTokens`` that returns a factor of each token's loss, without a gradient; the denominator
counts tokens, whatever they weigh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.config.parts import SFT_WEIGHTS


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
