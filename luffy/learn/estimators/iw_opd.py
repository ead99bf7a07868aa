"""IW-OPD (arXiv 2606.22600): on-policy distillation with more weight on the tokens before most of the disagreement."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from luffy.config import AlgorithmConfig
from luffy.learn.credit import Distill, ScoredGroup, TokenCredit, credit_function, distill
from luffy.schema import knob


@dataclass(frozen=True)
class IwOpd:
    early: float = knob(0.5, "extra weight of the first token; 0: plain distillation", ge=0)


@credit_function(
    "iw_opd",
    needs=("log_probs", "teacher"),
    settings=IwOpd,
    sft_term=False,
    follows_trace_term=True,
    uses_rewards=False,
    needs_contrast=False,
)
def iw_opd(group: ScoredGroup, cfg: AlgorithmConfig, settings: IwOpd) -> list[TokenCredit]:
    """``distill`` without rewards; a token's advantage a_t = log q - log p is multiplied by
    1 + early (1 - sum over s < t of |a_s| / sum over all s of |a_s|), over the own tokens of its response."""
    return [
        replace(given, advantages=given.advantages * earliness(given.advantages, settings.early))
        for given in distill.function(group, cfg, Distill())
    ]


def earliness(advantages: Tensor, early: float) -> Tensor:
    """[T]: 1 + early at the first token, falling to 1 as the absolute advantages add up."""
    size = advantages.double().abs()
    before = size.cumsum(0) - size
    return (1 + early * (1 - before / size.sum().clamp(min=1e-12))).float()
