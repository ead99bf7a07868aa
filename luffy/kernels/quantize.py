"""Rows in float8 (e4m3), each with a scale of its own that puts its largest number at the end of the range."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KIND = torch.float8_e4m3fn
LARGEST = torch.finfo(KIND).max  # 448
SMALLEST = 1e-12  # of a row's largest number: a row of zeros stays zero


@triton.jit
def _quantize(x, out, scales, width, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0), SMALLEST) / LARGEST
    tl.store(scales + row, scale)
    # Rounding must not leave the range, whose end is followed by NaN.
    scaled = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    tl.store(out + row * width + at, scaled.to(out.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor, out: Tensor | None = None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [N, K] -> float8 [N, K] and scales [N] in float32; to ``out`` and ``scales`` where they are given."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=KIND, device=x.device) if out is None else out
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if scales is None else scales
    block = triton.next_power_of_2(width)
    _quantize[(rows,)](
        x, out, scales, width,
        LARGEST=LARGEST, SMALLEST=SMALLEST, BLOCK=block, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip
    return out, scales
