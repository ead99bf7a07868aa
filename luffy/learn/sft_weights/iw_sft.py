"""iw-SFT (arXiv 2507.12856): traces that the policy has come to prefer over the reference count more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.config.parts import SFT_WEIGHTS
from luffy.core.masked import response_means
from luffy.learn.sft_weights import SftTokens
from luffy.schema import knob


@dataclass(frozen=True)
class IwSft:
    power: float = knob(1.0, "exponent of the ratio", ge=0)
    cap: float = knob(16.0, "largest weight", gt=0)


@SFT_WEIGHTS.register("iw_sft", settings=IwSft, needs_reference=True)
def iw_sft(tokens: SftTokens, settings: IwSft) -> Tensor:
    """min((p / p_ref)^power, cap) of a whole trace, p / p_ref the geometric mean over its tokens."""
    assert tokens.ref is not None
    log_ratio = response_means(tokens.log_prob - tokens.ref, tokens.counted, tokens.lengths)
    return torch.exp(settings.power * log_ratio).clamp(max=settings.cap)
