"""Named denominators: every reduction is a weight per token, fixed before the first backward pass.

A loss is then the plain sum of weight * token loss, so cutting a mini-batch into micro-batches or
spreading it over ranks cannot change it. The names are those verl users know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Reduction = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


class Counts(NamedTuple):
    """What denominators are made of. A sequence with no token in its mask is no sequence of this loss."""

    tokens: int
    sequences: int

    @staticmethod
    def of(masks: Iterable[Tensor]) -> Counts:
        counts = [int(m.sum()) for m in masks]
        return Counts(sum(counts), sum(c > 0 for c in counts))

    @staticmethod
    def total(parts: Iterable[Counts]) -> Counts:
        tokens, sequences = zip(*parts, strict=True)
        return Counts(sum(tokens), sum(sequences))


def token_weights(
    masks: Sequence[Tensor], reduction: str, max_response_tokens: int, whole: Counts | None = None
) -> list[Tensor]:
    """The weight of each token of each sequence, [T_i] each; a masked-out token weighs 0.

    ``seq-mean-token-sum-norm`` is Dr. GRPO's: a constant, the response budget, instead of the length.
    ``whole`` counts the whole mini-batch when ``masks`` are only this process's part of it.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown loss reduction {reduction!r}; known: {', '.join(REDUCTIONS)}")
    counts = [int(m.sum()) for m in masks]
    tokens, sequences = Counts.of(masks) if whole is None else whole

    def denominator(count: int) -> int:
        if reduction == "token-mean":
            return tokens
        if reduction == "seq-mean-token-sum":
            return sequences
        if reduction == "seq-mean-token-mean":
            return sequences * count
        return sequences * max_response_tokens

    return [m.to(torch.float32) / max(denominator(c), 1) for m, c in zip(masks, counts, strict=True)]
