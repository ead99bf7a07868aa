"""The gated activation of few rows in the kernel of its product, whose time is that of reading the weights once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS = 64  # of a tile: all rows
COLUMNS, DEPTH = 64, 64
MULTIPROCESSORS = 132  # of the GPU it was measured on


def is_faster(x: Tensor, columns: int) -> bool:
    """Whether `gated_product` is faster than a product by cuBLAS and the activation, which was measured on Hopper."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    return fills_the_gpu(len(x), x.shape[1], columns)


def fills_the_gpu(rows: int, depth: int, columns: int) -> bool:
    """Whether rows fill most of a tile, and tiles most multiprocessors, which compute up to three of them at once."""
    tiles, rest = divmod(columns, COLUMNS)
    fits = rest == 0 and depth % DEPTH == 0 and ROWS // 2 < rows <= ROWS
    return fits and MULTIPROCESSORS // 2 <= tiles <= 3 * MULTIPROCESSORS


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, out, rows, columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of columns; rounded where `luffy.kernels.elementwise` rounds."""
    first = tl.program_id(0) * COLUMNS
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        tile = x.load([0, start])
        gate = tl.dot(tile, weight.load([first, start]).T, gate, input_precision=PRECISION)
        up = tl.dot(tile, weight.load([columns + first, start]).T, up, input_precision=PRECISION)
    kind: tl.constexpr = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    row, column = tl.arange(0, ROWS)[:, None], first + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + row * columns + column, (active * up.to(kind).to(tl.float32)).to(kind), mask=row < rows)


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up [N, I] of at most ROWS rows x [N, H]; ``weight`` [2 I, H]: the weights of gate, then of up. Tiles
    cover I and H exactly."""
    (rows, depth), columns = x.shape, len(weight) // 2
    assert rows <= ROWS and columns % COLUMNS == 0 and depth % DEPTH == 0
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    tiles = columns // COLUMNS
    _product[(tiles,)](
        TensorDescriptor.from_tensor(x.contiguous(), [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(weight, [COLUMNS, DEPTH]),
        out, rows, columns, depth,
        ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=4 if tiles <= 2 * MULTIPROCESSORS else 3,  # with 4 two fit on a multiprocessor
    )  # fmt: skip
    return out
