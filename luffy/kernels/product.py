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
UNITS = 132  # multiprocessors of an H200
MOST_ROWS = 256  # beyond them `torch._scaled_mm` is faster
SHORTEST = 8 * DEPTH  # a stretch


@dataclass(frozen=True)
class Tiling:
    """Rows and columns of a tile, and the stretches of the depth."""

    rows: int
    columns: int
    stretches: int = 1


def tiling_for(rows: int, columns: int, depth: int, may_cut: bool) -> Tiling | None:
    """How to compute a product of this size, by shape alone; None where `torch._scaled_mm` is faster (docs/log.md) or
    tiles do not cover it exactly."""
    # Two programs with the smaller tiles fit a multiprocessor, one with the largest.
    height, width, at_once = (64, 64, 2) if rows <= 64 else (128, 64, 2) if rows <= 128 else (128, 128, 1)
    tiles = triton.cdiv(rows, height) * columns // width
    if rows > MOST_ROWS or columns % width or depth % DEPTH or (rows > 64 and tiles > UNITS):
        return None
    most = min(at_once * UNITS // tiles, depth // SHORTEST) if may_cut else 1
    return Tiling(height, width, triton.next_power_of_2(max(most, 1) + 1) // 2)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, x_scales, weight, weight_scales, bias, out, rows, columns, depth, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of x [rows, depth] times weight [columns, depth], both descriptors, over one stretch of ``each`` of the
    depth."""
    first_row, first_column, stretch = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS, tl.program_id(2)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = stretch * each
    for start in range(begin, tl.minimum(begin + each, depth), DEPTH):
        total = tl.dot(x.load([first_row, start]), weight.load([first_column, start]).T, total)
    total *= tl.load(x_scales + row, mask=row < rows, other=0.0)[:, None] * tl.load(weight_scales + column)[None, :]
    if bias is not None:
        total += tl.where(stretch == 0, tl.load(bias + column).to(tl.float32), 0.0)[None, :]
    place = (stretch * rows + row).to(tl.int64)
    tl.store(
        out + place[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=(row < rows)[:, None]
    )


def float8_product(
    x: Float8Rows, weight: Float8Rows, bias: Tensor | None, dtype: torch.dtype, tiling: Tiling
) -> Tensor:
    """x @ weight.T + bias: [rows, columns] in ``dtype``; with several stretches their sums in float32 [stretches, rows,
    columns]. Tiles must cover columns and depth exactly, and ``x`` have room for whole ones (`Float8Rows.empty`)."""
    (rows, depth), columns = x.values.shape, len(weight.values)
    assert columns % tiling.columns == 0 and depth % DEPTH == 0
    tiles, each = triton.cdiv(rows, tiling.rows), triton.cdiv(depth // DEPTH, tiling.stretches)
    # Rows behind the last one hold anything, and their results are never read: a tile that is partly filled takes no
    # longer than a full one.
    room = tiles * tiling.rows
    assert x.values.untyped_storage().nbytes() >= x.values.storage_offset() + room * depth
    stretches = triton.cdiv(depth // DEPTH, each)  # none is empty
    shape, kind = ((rows, columns), dtype) if stretches == 1 else ((stretches, rows, columns), torch.float32)
    out = torch.empty(shape, dtype=kind, device=x.values.device)
    _product[(tiles, columns // tiling.columns, stretches)](
        TensorDescriptor(x.values, [room, depth], [depth, 1], [tiling.rows, DEPTH]), x.scales,
        TensorDescriptor.from_tensor(weight.values, [tiling.columns, DEPTH]), weight.scales,
        bias, out, rows, columns, depth, each * DEPTH, ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=DEPTH,
        num_warps=4, num_stages=6 if tiling.rows == tiling.columns else 4,
    )  # fmt: skip
    return out
