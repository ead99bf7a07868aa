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
    """What denominators are made of: tokens whose weight is not 0, and sequences that have such a token."""

    tokens: int
    sequences: int

    @staticmethod
    def of(weights: Iterable[Tensor]) -> Counts:
        counts = [int(w.count_nonzero()) for w in weights]
        return Counts(sum(counts), sum(c > 0 for c in counts))

    @staticmethod
    def total(parts: Iterable[Counts]) -> Counts:
        tokens, sequences = zip(*parts, strict=True)
        return Counts(sum(tokens), sum(sequences))


def token_weights(
    weights: Sequence[Tensor], reduction: str, max_response_tokens: int, whole: Counts | None = None
) -> list[Tensor]:
    """The ``weights`` of each sequence's tokens, [T_i] each (bool or float), over the denominator of the loss.

    ``seq-mean-token-sum-norm`` is Dr. GRPO's: a constant, the response budget, instead of the length.
    ``whole`` counts the whole mini-batch when ``weights`` are only this process's part of it.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown loss reduction {reduction!r}; known: {', '.join(REDUCTIONS)}")
    counts = [int(w.count_nonzero()) for w in weights]
    tokens, sequences = Counts.of(weights) if whole is None else whole

    def denominator(count: int) -> int:
        if reduction == "token-mean":
            return tokens
        if reduction == "seq-mean-token-sum":
            return sequences
        if reduction == "seq-mean-token-mean":
            return sequences * count
        return sequences * max_response_tokens

    return [w.to(torch.float32) / max(denominator(c), 1) for w, c in zip(weights, counts, strict=True)]
