"""Means over a mask. An empty mask gives 0, with a gradient of 0, never NaN."""

from __future__ import annotations

from torch import Tensor


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask`` is on, else 0: whatever lies under the mask (NaN, inf) cannot leak,
    neither forward nor backward."""
    return values.masked_fill(~mask.bool(), 0.0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` is not 0; 0 if it is 0 everywhere: [1, 2, 9] with [1, 1, 0] gives 1.5."""
    mask = mask.bool()
    return keep(values, mask).sum() / mask.sum().clamp(min=1)
