"""Sums at the memory's speed: a gradient into a float32 sum, and the columns of a matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
MOST_ROWS = 1024  # that one program adds up, of few columns


@triton.jit
def _add(total, gradient, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    before = tl.load(total + at, mask=inside, other=0.0)
    more = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, before + more, mask=inside)


def add_(total: Tensor, gradient: Tensor) -> None:
    """``total`` (float32) += ``gradient`` of any dtype; both contiguous."""
    count = total.numel()
    _add[(triton.cdiv(count, BLOCK),)](total, gradient, count, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _column_sums(x, out, rows, width, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS rows of some columns."""
    part = tl.program_id(1)
    row = (part * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows) & (column < width)[None, :]
    values = tl.load(x + row * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + part * width + column, tl.sum(values, axis=0).to(out.dtype.element_ty), mask=column < width)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums [W] of rows [N, W] whose elements lie side by side, added in float32, always in the same order."""
    rows, width = x.shape
    some, columns = (triton.next_power_of_2(rows), 16) if rows <= MOST_ROWS else (64, 64)
    parts = triton.cdiv(rows, some)
    out = torch.empty(parts, width, dtype=dtype if parts == 1 else torch.float32, device=x.device)
    _column_sums[(triton.cdiv(width, columns), parts)](
        x, out, rows, width, x.stride(0), ROWS=some, COLUMNS=columns, num_warps=4 if some <= 64 else 8
    )
    return out[0] if parts == 1 else column_sums(out, dtype)
