"""EAFT (arXiv 2601.02151): tokens at which the policy is certain count less."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from luffy.config.parts import SFT_WEIGHTS
from luffy.learn.sft_weights import SftTokens
from luffy.schema import knob


@dataclass(frozen=True)
class Eaft:
    top: int = knob(20, "likeliest tokens whose entropy counts", ge=2)


@SFT_WEIGHTS.register("eaft", settings=Eaft)
def eaft(tokens: SftTokens, settings: Eaft) -> Tensor:
    """The entropy of the ``top`` likeliest tokens, renormalised, over log ``top``: 0 if the policy is certain."""
    assert tokens.top_entropy is not None
    return tokens.top_entropy
