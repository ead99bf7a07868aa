"""Means over a mask. An empty mask gives 0, with a gradient of 0, never NaN."""

from __future__ import annotations

from collections.abc import Sequence

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
