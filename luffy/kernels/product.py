"""Products of few rows in float8. cuBLAS takes large tiles, too few to occupy the GPU; here tiles are smaller, and the
depth may be cut into stretches, whose sums the reader adds up in order (`luffy.kernels.norm`): the same rows always
give the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from luffy.kernels.quantize import Float8Rows

DEPTH = 128  # of a tile


@dataclass(frozen=True)
class Tiling:
    """Rows and columns of a tile, and the stretches of the depth."""

    rows: int
    columns: int
    stretches: int = 1
    tma: bool = True
    warps: int = 8
    stages: int = 4


def tiling_for(rows: int, columns: int, depth: int, may_cut: bool) -> Tiling | None:
    """How to compute a product of this size; None where `torch._scaled_mm` is faster."""
    return None


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, x_scales, weight, weight_scales, bias, out, rows, columns, depth, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One tile of x [rows, depth] times weight [columns, depth] over one stretch of ``each`` of the depth."""
    first_row, first_column, stretch = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS, tl.program_id(2)
    row, column, at = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    inside = (row < rows)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = stretch * each
    for start in range(begin, tl.minimum(begin + each, depth), DEPTH):
        if TMA:
            x_tile = x.load([first_row, start])
            weight_tile = weight.load([first_column, start])
        else:
            x_tile = tl.load(x + row[:, None].to(tl.int64) * depth + start + at[None, :], mask=inside, other=0.0)
            weight_tile = tl.load(weight + column[:, None].to(tl.int64) * depth + start + at[None, :])
        total = tl.dot(x_tile, weight_tile.T, total)
    total *= tl.load(x_scales + row, mask=row < rows, other=0.0)[:, None] * tl.load(weight_scales + column)[None, :]
    if bias is not None:
        total += tl.where(stretch == 0, tl.load(bias + column).to(tl.float32), 0.0)[None, :]
    place = (stretch * rows + row).to(tl.int64)
    tl.store(out + place[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=inside)


def float8_product(
    x: Float8Rows, weight: Float8Rows, bias: Tensor | None, dtype: torch.dtype, tiling: Tiling
) -> Tensor:
    """x @ weight.T + bias: [rows, columns] in ``dtype``; with several stretches their sums in float32 [stretches, rows,
    columns]. Tiles must cover columns and depth exactly."""
    (rows, depth), columns = x.values.shape, len(weight.values)
    assert columns % tiling.columns == 0 and depth % DEPTH == 0
    blocks = depth // DEPTH
    each = triton.cdiv(blocks, tiling.stretches)
    stretches = triton.cdiv(blocks, each)  # none is empty
    shape, kind = ((rows, columns), dtype) if stretches == 1 else ((stretches, rows, columns), torch.float32)
    out = torch.empty(shape, dtype=kind, device=x.values.device)
    factors = x.values, weight.values
    if tiling.tma:
        sizes = tiling.rows, tiling.columns
        factors = tuple(
            TensorDescriptor.from_tensor(factor, [size, DEPTH]) for factor, size in zip(factors, sizes, strict=True)
        )
    grid = (triton.cdiv(rows, tiling.rows), columns // tiling.columns, stretches)
    _product[grid](
        factors[0], x.scales, factors[1], weight.scales, bias, out, rows, columns, depth, each * DEPTH,
        ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=DEPTH, TMA=tiling.tma,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out
