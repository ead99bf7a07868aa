"""RLSD (arXiv 2604.03128): rewards decide the sign of an advantage, a teacher that sees the solution its size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from luffy.config import AlgorithmConfig
from luffy.learn.credit import ScoredGroup, TokenCredit, credit_function, group_baseline, teacher_gap
from luffy.schema import knob
from luffy.types import is_drawn


@dataclass(frozen=True)
class Rlsd:
    mix: float = knob(0.5, "fraction of the advantage that the teacher scales", ge=0, le=1)
    clip: float = knob(0.2, "the teacher's factor is clipped at 1 - this and 1 + this", ge=0, le=1)


@credit_function("rlsd", needs=("log_probs", "teacher"), settings=Rlsd, sft_term=False, follows_trace_term=True)
def rlsd(group: ScoredGroup, cfg: AlgorithmConfig, settings: Rlsd) -> list[TokenCredit]:
    """A_t = A ((1 - mix) + mix clip(exp(sign(A) d), 1 +- clip)) on own tokens that the teacher scored, with d its
    log q - log p before the update; every other token keeps the advantage of ``group_baseline``."""
    credit = []
    for given, rollout, tokens in zip(group_baseline(group, cfg), group.rollouts, group.tokens, strict=True):
        if tokens.teacher is not None:
            scale = (given.advantages.sign() * teacher_gap(tokens)).exp().clamp(1 - settings.clip, 1 + settings.clip)
            factor = torch.where(is_drawn(rollout.authors), 1 - settings.mix + settings.mix * scale, 1.0)
            given = replace(given, advantages=given.advantages * factor)
        credit.append(given)
    return credit
