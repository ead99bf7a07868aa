"""Rows in float8 (e4m3), each with a scale of its own that puts its largest number at the end of the range."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

KIND = torch.float8_e4m3fn
LARGEST = tl.constexpr(torch.finfo(KIND).max)  # 448
ROOM = 128  # rows
SMALLEST = tl.constexpr(1e-12)  # of a row's largest number: a row of zeros stays zero


class Float8Rows(NamedTuple):
    """Numbers [N, K] in float8, which scales [N] in float32 multiply."""

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, shape: torch.Size, device: torch.device) -> Float8Rows:
        """Uninitialised rows with memory for a multiple of ROOM rows: products read whole tiles
        (`luffy.kernels.product`)."""
        rows, width = shape
        values = torch.empty(triton.cdiv(rows, ROOM) * ROOM, width, dtype=KIND, device=device)[:rows]
        return cls(values, torch.empty(rows, dtype=torch.float32, device=device))


@triton.jit
def row_scale(top):
    """The scale of a row whose largest number is ``top``."""
    return tl.maximum(top, SMALLEST) / LARGEST


@triton.jit
def in_range(value, scale):
    """Numbers of a row, in float32, for float8. Rounding must not leave the range, whose end is followed by NaN."""
    return tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)


@triton.jit
def scaled_row(value):
    """A row in float32 -> (the row within the range of float8, its scale)."""
    scale = row_scale(tl.max(tl.abs(value), axis=0))
    return in_range(value, scale), scale


@triton.jit
def _quantize(x, out, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scaled, scale = scaled_row(value)
    tl.store(scales + row, scale)
    tl.store(out + row * width + at, scaled.to(out.dtype.element_ty), mask=inside)


def warps_of_a_row(block: int) -> int:
    return min(max(block // 1024, 1), 16)


def quantize_rows(x: Tensor, out: Float8Rows | None = None) -> Float8Rows:
    """Rows x [N, K] in float8; in ``out`` where it is given."""
    x = x.contiguous()
    rows, width = x.shape
    out = Float8Rows.empty(x.shape, x.device) if out is None else out
    block = triton.next_power_of_2(width)
    _quantize[(rows,)](x, out.values, out.scales, width, BLOCK=block, num_warps=warps_of_a_row(block))
    return out
