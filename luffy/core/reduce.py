"""Masked means and named denominators: every reduction is a weight per token, fixed before the first backward pass.

A loss is then the plain sum of weight * token loss, so cutting a mini-batch into micro-batches or
spreading it over ranks cannot change it. The names are those verl users know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask`` is on, else 0: whatever lies under the mask (NaN, inf) cannot leak,
    neither forward nor backward."""
    return values.masked_fill(~mask.bool(), 0.0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` is not 0; 0 if it is 0 everywhere: [1, 2, 9] with [1, 1, 0] gives 1.5."""
    mask = mask.bool()
    return keep(values, mask).sum() / mask.sum().clamp(min=1)


def response_means(values: Tensor, counted: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """The mean over the ``counted`` tokens of each response, at every token of it; 0 where none is counted. ``lengths``
    of the responses in a packed row; without them each row of a padded batch is a response."""
    values = keep(values, counted)
    if lengths is None:
        return (values.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)).expand_as(values)
    tokens = torch.tensor(lengths, device=values.device)
    response = torch.arange(len(tokens), device=values.device).repeat_interleave(tokens)
    sums = values.new_zeros(len(tokens)).index_add(0, response, values)
    counts = values.new_zeros(len(tokens)).index_add(0, response, counted.to(values.dtype))
    return (sums / counts.clamp(min=1))[response]


Reduction = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


class Counts(NamedTuple):
    """What denominators are made of: tokens whose weight is not 0, and sequences that have such a token."""

    tokens: int
    sequences: int

    @staticmethod
    def of(weights: Sequence[Tensor]) -> Counts:
        counts = counted_tokens(weights)
        return Counts(sum(counts), sum(c > 0 for c in counts))

    @staticmethod
    def total(parts: Iterable[Counts]) -> Counts:
        tokens, sequences = zip(*parts, strict=True)
        return Counts(sum(tokens), sum(sequences))


def counted_tokens(weights: Sequence[Tensor]) -> list[int]:
    """Number of tokens with a weight other than 0, per sequence; counted in one call, as there are thousands."""
    if not weights:
        return []
    so_far = torch.cat([torch.zeros(1, device=weights[0].device), *weights]).ne(0).cumsum(0)
    ends = torch.tensor([w.numel() for w in weights], device=so_far.device).cumsum(0)
    counts: list[int] = so_far[ends].diff(prepend=so_far[:1]).tolist()
    return counts


def token_weights(
    weights: Sequence[Tensor], reduction: str, max_response_tokens: int, whole: Counts | None = None
) -> list[Tensor]:
    """The ``weights`` of each sequence's tokens, [T_i] each (bool or float), over the denominator of the loss;
    ``whole`` counts the whole mini-batch when ``weights`` are only this process's part of it."""
    over = sequence_denominators(weights, reduction, max_response_tokens, whole or Counts.of(weights))
    return list(divided(weights, over).split([w.numel() for w in weights])) if weights else []


def sequence_denominators(
    weights: Sequence[Tensor], reduction: str, max_response_tokens: int, whole: Counts
) -> list[int]:
    """What the weights of each sequence's tokens are divided by. ``seq-mean-token-sum-norm`` is Dr. GRPO's: a constant,
    the response budget, instead of the length."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown loss reduction {reduction!r}; known: {', '.join(REDUCTIONS)}")
    if reduction == "seq-mean-token-mean":
        return [max(whole.sequences * count, 1) for count in counted_tokens(weights)]
    of_all = {
        "token-mean": whole.tokens,
        "seq-mean-token-sum": whole.sequences,
        "seq-mean-token-sum-norm": whole.sequences * max_response_tokens,
    }
    return [max(of_all[reduction], 1)] * len(weights)


def divided(weights: Sequence[Tensor], denominators: Sequence[int]) -> Tensor:
    """[T] float32: the weights of all sequences, each over its own denominator."""
    flat = torch.cat(list(weights)).to(torch.float32)
    over = torch.tensor(denominators, dtype=torch.float32, device=flat.device)
    return flat / over.repeat_interleave(torch.tensor([w.numel() for w in weights], device=flat.device))
