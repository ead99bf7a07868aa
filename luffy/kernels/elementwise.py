"""Gated activation and rotary embedding, each in one pass, with gradients; the embedding's angles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from luffy.kernels.quantize import Float8Rows, in_range, row_scale, warps_of_a_row


@triton.jit
def _swiglu_forward(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0)
    u = tl.load(up + at, mask=inside, other=0.0)
    g32 = g.to(tl.float32)
    active = (g32 / (1.0 + tl.exp(-g32))).to(g.dtype).to(tl.float32)
    tl.store(out + at, (active * u.to(tl.float32)).to(g.dtype), mask=inside)


@triton.jit
def _swiglu_rows(gate, up, out, gate_row, up_row, width, BLOCK: tl.constexpr):
    """The same for one stretch of one row, where rows lie apart."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(gate + row * gate_row + at, mask=inside, other=0.0)
    u = tl.load(up + row * up_row + at, mask=inside, other=0.0)
    g32 = g.to(tl.float32)
    active = (g32 / (1.0 + tl.exp(-g32))).to(g.dtype).to(tl.float32)
    tl.store(out + row * width + at, (active * u.to(tl.float32)).to(g.dtype), mask=inside)


@triton.jit
def _gated(gate, up, at, width):
    """silu(gate) * up at some places of a row, in float32 and rounded as above."""
    g = tl.load(gate + at, mask=at < width, other=0.0)
    u = tl.load(up + at, mask=at < width, other=0.0)
    g32 = g.to(tl.float32)
    active = (g32 / (1.0 + tl.exp(-g32))).to(g.dtype).to(tl.float32)
    return (active * u.to(tl.float32)).to(g.dtype).to(tl.float32)


@triton.jit
def _swiglu_quantized(
    gate, up, out, scales, gate_row, up_row, width, FIRST: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """One whole row, quantized, in two blocks: powers of two that cover a width like 18,944 without much waste."""
    row = tl.program_id(0).to(tl.int64)
    gate, up, out = gate + row * gate_row, up + row * up_row, out + row * width
    kind = out.dtype.element_ty
    at, then = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    first, rest = _gated(gate, up, at, width), _gated(gate, up, then, width)
    scale = row_scale(tl.maximum(tl.max(tl.abs(first), axis=0), tl.max(tl.abs(rest), axis=0)))
    tl.store(scales + row, scale)
    tl.store(out + at, in_range(first, scale).to(kind), mask=at < width)
    tl.store(out + then, in_range(rest, scale).to(kind), mask=then < width)


@triton.jit
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0)
    kind = u.dtype
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    tl.store(grad_up + at, (d * g * sigmoid).to(kind), mask=inside)
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(grad_gate + at, (d * u.to(tl.float32) * slope).to(kind), mask=inside)


BLOCK = 2048
ROW_BLOCK = 1024


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _launch_swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        count = gate.numel()
        _swiglu_backward[(triton.cdiv(count, BLOCK),)](
            grad.contiguous(), gate, up, grad_gate, grad_up, count, BLOCK=BLOCK, num_warps=4
        )
        return grad_gate, grad_up


def _launch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not (gate.is_contiguous() and up.is_contiguous()):
        rows, width = gate.shape
        _swiglu_rows[(rows, triton.cdiv(width, ROW_BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=ROW_BLOCK, num_warps=4
        )
        return out
    count = gate.numel()
    _swiglu_forward[(triton.cdiv(count, BLOCK),)](gate, up, out, count, BLOCK=BLOCK, num_warps=4)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of rows [N, I], whose elements lie side by side."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out: Tensor = _Swiglu.apply(gate.contiguous(), up.contiguous())
        return out
    return _launch_swiglu(gate, up)


def swiglu_quantized(gate: Tensor, up: Tensor) -> Float8Rows:
    """The same in float8; without gradients."""
    rows, width = gate.shape
    out = Float8Rows.empty(gate.shape, gate.device)
    first = triton.next_power_of_2(width) // 2
    _swiglu_quantized[(rows,)](
        gate, up, *out, gate.stride(0), up.stride(0), width,
        FIRST=first, REST=triton.next_power_of_2(width - first), num_warps=warps_of_a_row(2 * first),
    )  # fmt: skip
    return out


@triton.jit
def _rotate(x, out, cos, sin, x_row, heads, width, FLIP: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """All heads of one token: x [heads, D] -> out [heads, D]. FLIP turns back, for gradients."""
    row = tl.program_id(0).to(tl.int64)
    half = width // 2
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (at < half)
    source = x + row * x_row + head * width + at
    kind = x.dtype.element_ty
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    c1 = tl.load(cos + row * width + at, mask=at < half, other=0.0).to(tl.float32)
    c2 = tl.load(cos + row * width + half + at, mask=at < half, other=0.0).to(tl.float32)
    s1 = tl.load(sin + row * width + at, mask=at < half, other=0.0).to(tl.float32)
    s2 = tl.load(sin + row * width + half + at, mask=at < half, other=0.0).to(tl.float32)
    if FLIP:
        lower = (first * c1).to(kind).to(tl.float32) + (second * s2).to(kind).to(tl.float32)
        upper = (second * c2).to(kind).to(tl.float32) - (first * s1).to(kind).to(tl.float32)
    else:
        lower = (first * c1).to(kind).to(tl.float32) - (second * s1).to(kind).to(tl.float32)
        upper = (second * c2).to(kind).to(tl.float32) + (first * s2).to(kind).to(tl.float32)
    target = out + (row * heads + head) * width + at
    tl.store(target, lower.to(kind), mask=inside)
    tl.store(target + half, upper.to(kind), mask=inside)


def _launch_rotate(x: Tensor, cos: Tensor, sin: Tensor, flip: bool) -> Tensor:
    tokens, heads, width = x.shape
    if x.stride(1) != width or x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate[(tokens,)](
        x, out, cos, sin, x.stride(0), heads, width,
        FLIP=flip, HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(width // 2), num_warps=4,
    )  # fmt: skip
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch_rotate(x, cos, sin, flip=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _launch_rotate(grad, cos, sin, flip=True), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [N, heads, D] by the angles of each token, given as cos and sin [N, D]."""
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Rotate.apply(x, cos, sin)
        return out
    return _launch_rotate(x, cos, sin, flip=False)


@triton.jit
def _angles(positions, frequencies, cos, sin, scale, half, HALF: tl.constexpr):
    """One token; both halves of a head turn alike."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF)
    inside = at < half
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + at, mask=inside, other=0.0).to(tl.float32)
    kind = cos.dtype.element_ty
    c, s = (tl.cos(angle) * scale).to(kind), (tl.sin(angle) * scale).to(kind)
    place = row * 2 * half + at
    tl.store(cos + place, c, mask=inside)
    tl.store(cos + place + half, c, mask=inside)
    tl.store(sin + place, s, mask=inside)
    tl.store(sin + place + half, s, mask=inside)


def rotary_angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [N, D] of tokens at ``positions`` [N], times ``scale``; ``frequencies`` [D / 2]."""
    half = len(frequencies)
    cos, sin = torch.empty(2, len(positions), 2 * half, dtype=dtype, device=positions.device)
    _angles[(len(positions),)](
        positions, frequencies, cos, sin, scale, half, HALF=triton.next_power_of_2(half), num_warps=1
    )
    return cos, sin
