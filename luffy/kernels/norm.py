"""Residual sum and RMS norm in one pass over memory, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from luffy.kernels.quantize import KIND, Float8Rows, scaled_row
from luffy.kernels.sums import column_sums

PROGRAMS = 528  # of the backward pass: what an H200 runs at once


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, residual, weight, normed, total, scales, rows, width, eps,
    ADD: tl.constexpr, PARTS: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. ``scales``: of the quantized row, or what the row was multiplied by."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    kind = total.dtype.element_ty
    value = tl.load(x + row * width + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + (part * rows + row) * width + at, mask=inside, other=0.0)
    value = value.to(kind)
    if ADD:
        before = tl.load(residual + row * width + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(kind)
        tl.store(total + row * width + at, value, mask=inside)
    value32 = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value32 * value32, axis=0) / width + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    out = (gain * (value32 * scale).to(kind).to(tl.float32)).to(kind)
    if QUANTIZE:
        out, scale = scaled_row(out.to(tl.float32))
    tl.store(scales + row, scale)
    tl.store(normed + row * width + at, out.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "rows_each"])
def _backward(
    grad_normed, grad_total, total, weight, rstd, grad_x, grad_weight, rows, rows_each, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program takes ``rows_each`` rows, so that the gradient of the weight leaves it already summed over them."""
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(rows_each):
        row = program * rows_each + step
        valid = row * width + at < tl.minimum(row + 1, rows) * width
        upper = tl.load(grad_normed + row * width + at, mask=valid, other=0.0).to(tl.float32)
        value = tl.load(total + row * width + at, mask=valid, other=0.0).to(tl.float32)
        scale = tl.load(rstd + tl.minimum(row, rows - 1))
        unit = value * scale
        sum_weight += upper * unit
        along = upper * gain
        grad = scale * (along - unit * (tl.sum(along * unit, axis=0) / width))
        grad += tl.load(grad_total + row * width + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(grad_x + row * width + at, grad.to(grad_x.dtype.element_ty), mask=valid)
    tl.store(grad_weight + program * width + at, sum_weight, mask=inside)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 8)


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, normed: Tensor, scales: Tensor
) -> Tensor:
    """Fills ``normed`` [N, H] and ``scales`` [N]; returns the sum."""
    rows, width = normed.shape
    x = x.contiguous()
    total = x if residual is None else residual.new_empty(residual.shape)
    block = triton.next_power_of_2(width)
    _forward[(rows,)](
        x, residual, weight, normed, total, scales, rows, width, eps,
        ADD=residual is not None, PARTS=len(x) if x.dim() == 3 else 1, QUANTIZE=normed.dtype == KIND, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip
    return total


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, rstd = x.new_empty(x.shape), x.new_empty(len(x), dtype=torch.float32)
        total = _launch_forward(x, residual, weight, eps, normed, rstd)
        ctx.save_for_backward(total, weight, rstd)
        ctx.has_residual = residual is not None
        # An input returned as it came would be seen as changed in place; the caller has it anyway.
        return normed, total if residual is not None else total.view_as(total)

    @staticmethod
    def backward(ctx: Any, grad_normed: Tensor, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        rows, width = total.shape
        rows_each = max(1, -(-rows // PROGRAMS))
        programs = -(-rows // rows_each)
        grad_x = torch.empty_like(total)
        partial = torch.empty(programs, width, dtype=torch.float32, device=total.device)
        block = triton.next_power_of_2(width)
        _backward[(programs,)](
            grad_normed.contiguous(), grad_total.contiguous(), total, weight, rstd, grad_x, partial, rows, rows_each,
            width, BLOCK=block, num_warps=min(2 * _warps(block), 8),
        )  # fmt: skip
        grad_weight = column_sums(partial, weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_x if ctx.has_residual else None, grad_weight, None


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual) for rows [N, H]; without a residual, (norm(x), x). Without gradients x may be
    sums [parts, N, H] in float32, which are added up and rounded to the residual's type first."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out: tuple[Tensor, Tensor] = _AddNorm.apply(x, residual, weight, eps)
        return out
    stream = x if residual is None else residual
    normed, rstd = stream.new_empty(stream.shape), stream.new_empty(len(stream), dtype=torch.float32)
    return normed, _launch_forward(x, residual, weight, eps, normed, rstd)


def add_rms_norm_quantized(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Float8Rows, Tensor]:
    """The same with the norm's rows in float8; without gradients."""
    normed = Float8Rows.empty((x if residual is None else residual).shape, x.device)
    return normed, _launch_forward(x, residual, weight, eps, *normed)
