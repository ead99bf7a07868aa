"""Products of few rows with a weight, whose time is that of reading the weight once.

A program computes a tile of the result over one stretch of the depth. The sums of stretches are added up in order by
the reader (`luffy.kernels.norm`): the same rows always give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of a tile, the stretches of the whole depth, and how a program runs."""

    rows: int
    columns: int
    depth: int
    stretches: int = 1
    tma: bool = True
    warps: int = 4
    stages: int = 4


MOST_ROWS = 0  # beyond them products of cuBLAS are faster
PROGRAMS = 144  # a few more than a large GPU has multiprocessors


def gated_tile(x: Tensor, columns: int) -> Tile | None:
    """How to compute `gated_product`; None where a product and an activation are faster."""
    return _tile(x, columns, 64, 64, stretches=1)


def tile_for(x: Tensor, columns: int, may_cut: bool) -> Tile | None:
    """How to compute `product`; None where cuBLAS is faster. Without ``may_cut`` in one stretch."""
    return _tile(x, columns, 64, 128, stretches=max(round(PROGRAMS * 64 / columns), 1)) if may_cut else None


def _tile(x: Tensor, columns: int, width: int, depth: int, stretches: int) -> Tile | None:
    if len(x) > MOST_ROWS or x.dtype == torch.float32 or columns % width or x.shape[1] % depth:
        return None
    rows = 64 if len(x) <= 64 else 128
    return Tile(rows, width, depth, min(stretches, x.shape[1] // depth), warps=rows // 16)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, columns, depth, each,
    GATED: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of x [rows, depth] times weight [columns, depth] over one stretch of ``each`` of the depth. With GATED
    the weight has as many rows again for up, and the result is rounded where `luffy.kernels.elementwise` rounds."""
    first_row, first_column, stretch = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS, tl.program_id(2)
    row, column, at = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    inside = (row < rows)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = stretch * each
    for start in range(begin, tl.minimum(begin + each, depth), DEPTH):
        if TMA:
            x_tile = x.load([first_row, start])
            weight_tile = weight.load([first_column, start])
        else:
            weight_at = weight + column[:, None] * depth + start + at[None, :]
            x_tile = tl.load(x + row[:, None] * depth + start + at[None, :], mask=inside, other=0.0)
            weight_tile = tl.load(weight_at)
        total = tl.dot(x_tile, weight_tile.T, total, input_precision=PRECISION)
        if GATED:
            up_tile = weight.load([columns + first_column, start]) if TMA else tl.load(weight_at + columns * depth)
            up = tl.dot(x_tile, up_tile.T, up, input_precision=PRECISION)
    kind: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        total += tl.where(stretch == 0, tl.load(bias + column).to(tl.float32), 0.0)[None, :]
    if GATED:
        gate = total.to(kind).to(tl.float32)
        total = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    place = out + (stretch * rows + row)[:, None] * columns + column[None, :]
    tl.store(place, total.to(kind), mask=inside)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile, gated: bool) -> None:
    """``out`` [rows, columns], or [stretches, rows, columns]. Tiles must cover columns and depth exactly."""
    (rows, depth), columns = x.shape, out.shape[-1]
    assert columns % tile.columns == 0 and depth % tile.depth == 0
    factors: tuple[Any, ...] = x.contiguous(), weight
    if tile.tma:
        sizes = tile.rows, tile.columns
        factors = tuple(
            TensorDescriptor.from_tensor(factor, [size, tile.depth])
            for factor, size in zip(factors, sizes, strict=True)
        )
    _product[(triton.cdiv(rows, tile.rows), columns // tile.columns, tile.stretches)](
        *factors, bias, out, rows, columns, depth, triton.cdiv(depth // tile.depth, tile.stretches) * tile.depth,
        GATED=gated, TMA=tile.tma, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def gated_product(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """silu(gate) * up [N, I] of rows x [N, H]; ``weight`` [2 I, H]: the weights of gate, then of up."""
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, out, tile, gated=True)
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """x @ weight.T + bias: [N, O]; with several stretches their sums in float32 [stretches, N, O]."""
    shape, kind = (len(x), len(weight)), x.dtype
    if tile.stretches > 1:
        shape, kind = (tile.stretches, *shape), torch.float32  # type: ignore[assignment]
    out = torch.empty(shape, dtype=kind, device=x.device)
    _launch(x, weight, bias, out, tile, gated=False)
    return out
