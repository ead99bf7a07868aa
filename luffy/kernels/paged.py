"""Attention over a paged cache: new keys and values go to their pages, one query per sequence reads them.

The cache is one block [pages, layers, 2, KV heads, PAGE, D]; a sequence's row of the page table names the
pages it fills in order. Kernels get the block's address from device memory, not as an argument, and none
of their strides depends on the number of pages: a CUDA graph that holds them stays valid when the block
is given back for an update and taken again elsewhere, larger or smaller.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAGE = 64  # tokens


@triton.jit
def _rotated(first, second, c, s, kind: tl.constexpr):
    """c * first - s * second, rounded where `transformers` rounds."""
    return ((first * c).to(kind).to(tl.float32) - (second * s).to(kind).to(tl.float32)).to(kind)


@triton.jit
def _store(
    q, k, v, q_out, cos, sin, address, tables, rows, positions, layer, page_stride,
    q_row, k_row, v_row, table_width, q_heads, kv_heads, width,
    ROTATE: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token: its keys and values to their place; with ROTATE, queries and keys are turned first."""
    token = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = k.dtype.element_ty
    half = width // 2
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    position = tl.load(positions + token)
    row = tl.load(rows + token).to(tl.int64)
    page = tl.load(tables + row * table_width + position // PAGE).to(tl.int64)
    base = tl.load(address).to(tl.pointer_type(kind))
    side = kv_heads * PAGE * width
    place = base + page * page_stride + layer * 2 * side + (position % PAGE) * width
    inside = (head < kv_heads) & (at < half)
    k_at = k + token * k_row + head * width + at
    k1 = tl.load(k_at, mask=inside, other=0.0)
    k2 = tl.load(k_at + half, mask=inside, other=0.0)
    if ROTATE:
        c1 = tl.load(cos + token * width + at, mask=at < half, other=0.0).to(tl.float32)
        c2 = tl.load(cos + token * width + half + at, mask=at < half, other=0.0).to(tl.float32)
        s1 = tl.load(sin + token * width + at, mask=at < half, other=0.0).to(tl.float32)
        s2 = tl.load(sin + token * width + half + at, mask=at < half, other=0.0).to(tl.float32)
        a1, a2 = k1.to(tl.float32), k2.to(tl.float32)
        k1 = _rotated(a1, a2, c1, s1, kind)
        k2 = _rotated(a2, a1, c2, -s2, kind)
        q_inside = (head < q_heads) & (at < half)
        q_at = q + token * q_row + head * width + at
        b1 = tl.load(q_at, mask=q_inside, other=0.0).to(tl.float32)
        b2 = tl.load(q_at + half, mask=q_inside, other=0.0).to(tl.float32)
        out = q_out + (token * q_heads + head) * width + at
        tl.store(out, _rotated(b1, b2, c1, s1, kind), mask=q_inside)
        tl.store(out + half, _rotated(b2, b1, c2, -s2, kind), mask=q_inside)
    target = place + head * PAGE * width + at
    tl.store(target, k1, mask=inside)
    tl.store(target + half, k2, mask=inside)
    v_at = v + token * v_row + head * width + at
    tl.store(target + side, tl.load(v_at, mask=inside, other=0.0), mask=inside)
    tl.store(target + side + half, tl.load(v_at + half, mask=inside, other=0.0), mask=inside)


@triton.jit
def _attend(
    q, address, tables, positions, out, partial, tops, sums, layer, page_stride, table_width, scale, window,
    sharing, kv_heads, width: tl.constexpr,
    SPLITS: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sequence, one key head and the ``sharing`` query heads that use it, one of SPLITS stretches of pages."""
    row, kv, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kind: tl.constexpr = q.dtype.element_ty
    length = tl.load(positions + row) + 1
    first = tl.maximum(length - window, 0)
    begin, end = first // PAGE, (length + PAGE - 1) // PAGE
    each = (end - begin + SPLITS - 1) // SPLITS
    begin = begin + split * each
    end = tl.minimum(begin + each, end)
    group, at, d = tl.arange(0, GROUP), tl.arange(0, PAGE), tl.arange(0, WIDTH)
    wide = (d < width)[None, :]
    q_inside = (group[:, None] < sharing) & wide
    heads = row * kv_heads * sharing + kv * sharing + group
    query = tl.load(q + heads[:, None] * width + d[None, :], mask=q_inside, other=0.0)
    base = tl.load(address).to(tl.pointer_type(kind))
    side = kv_heads * PAGE * width
    base += layer * 2 * side + kv * PAGE * width
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, WIDTH], tl.float32)
    inner = at[:, None] * width + d[None, :]
    for number in range(begin, end):
        page = tl.load(tables + row * table_width + number).to(tl.int64)
        start = tl.multiple_of(base + page * page_stride, 16)  # read from memory, its alignment must be told
        place = number * PAGE + at
        seen = (place >= first) & (place < length)
        tile = seen[:, None] if width == WIDTH else seen[:, None] & wide
        keys = tl.load(start + inner, mask=tile, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        decay = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top[:, None])
        values = tl.load(start + side + inner, mask=tile, other=0.0)
        acc = acc * decay[:, None] + tl.dot(weights.to(kind), values, input_precision=PRECISION)
        total = total * decay + tl.sum(weights, axis=1)
        top = new_top
    if SPLITS == 1:
        tl.store(out + heads[:, None] * width + d[None, :], (acc / total[:, None]).to(kind), mask=q_inside)
    else:
        slot = heads * SPLITS + split
        tl.store(partial + slot[:, None] * width + d[None, :], acc, mask=q_inside)
        tl.store(tops + slot, top, mask=group < sharing)
        tl.store(sums + slot, total, mask=group < sharing)


@triton.jit
def _combine(partial, tops, sums, out, width, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """One head of one sequence: its stretches put together. Empty stretches weigh nothing."""
    head = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    top = tl.load(tops + head * SPLITS + split)
    best = tl.max(top, axis=0)
    weight = tl.exp(top - best)
    total = tl.sum(weight * tl.load(sums + head * SPLITS + split), axis=0)
    inside = (split[:, None] >= 0) & (d[None, :] < width)
    parts = tl.load(partial + (head * SPLITS + split)[:, None] * width + d[None, :], mask=inside, other=0.0)
    mixed = tl.sum(tl.where(weight[:, None] > 0, parts * weight[:, None], 0.0), axis=0) / total
    tl.store(out + head * width + d, mixed.to(out.dtype.element_ty), mask=d < width)


def _packed_heads(x: Tensor) -> Tensor:
    """Heads [N, heads, D] with every token's heads side by side; tokens may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def store(
    k: Tensor, v: Tensor, address: Tensor, tables: Tensor, rows: Tensor, positions: Tensor, layer: int, page_stride: int
) -> None:
    """Keys and values [N, KV heads, D] of tokens at ``positions`` of the sequences ``rows`` of the table."""
    k, v = _packed_heads(k), _packed_heads(v)
    tokens, kv_heads, width = k.shape
    _store[(tokens,)](
        k, k, v, k, k, k, address, tables, rows, positions, layer, page_stride,
        k.stride(0), k.stride(0), v.stride(0), tables.stride(0), 0, kv_heads, width,
        ROTATE=False, PAGE=PAGE, HEADS=triton.next_power_of_2(kv_heads), HALF=triton.next_power_of_2(width // 2),
        num_warps=1,
    )  # fmt: skip


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    address: Tensor, tables: Tensor, rows: Tensor, positions: Tensor, layer: int, page_stride: int,
) -> Tensor:  # fmt: skip
    """The rotated queries [N, heads, D]; rotated keys and the values are in their pages afterwards."""
    q, k, v = _packed_heads(q), _packed_heads(k), _packed_heads(v)
    tokens, q_heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _store[(tokens,)](
        q, k, v, out, cos, sin, address, tables, rows, positions, layer, page_stride,
        q.stride(0), k.stride(0), v.stride(0), tables.stride(0), q_heads, k.shape[1], width,
        ROTATE=True, PAGE=PAGE, HEADS=triton.next_power_of_2(q_heads), HALF=triton.next_power_of_2(width // 2),
        num_warps=4,
    )  # fmt: skip
    return out


def splits_for(rows: int, kv_heads: int, longest_pages: int, device: torch.device) -> int:
    """Stretches per sequence: enough programs to fill the GPU twice, no more than there can be pages."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    wanted = triton.next_power_of_2(triton.cdiv(2 * units, rows * kv_heads))
    return int(min(wanted, triton.next_power_of_2(longest_pages), 32))


def attend(
    q: Tensor, address: Tensor, tables: Tensor, positions: Tensor, layer: int, page_stride: int, kv_heads: int,
    scale: float, window: int | None, splits: int,
) -> Tensor:  # fmt: skip
    """q [B, heads, D], row i of the table its pages: attention over positions 0 to ``positions[i]``."""
    rows, heads, width = q.shape
    out = torch.empty_like(q)
    block = max(16, triton.next_power_of_2(width))  # tl.dot takes no smaller ones
    shape = (rows * heads * splits,)
    partial = q.new_empty((*shape, width) if splits > 1 else (1,), dtype=torch.float32)
    tops, sums = (q.new_empty(shape if splits > 1 else (1,), dtype=torch.float32) for _ in range(2))
    sharing = heads // kv_heads
    no_window = 1 << 30
    _attend[(rows, kv_heads, splits)](
        q, address, tables, positions, out, partial, tops, sums, layer, page_stride, tables.stride(0), scale,
        window or no_window, sharing, kv_heads, width,
        SPLITS=splits, PAGE=PAGE, GROUP=max(16, triton.next_power_of_2(sharing)), WIDTH=block,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows * heads,)](partial, tops, sums, out, width, SPLITS=splits, WIDTH=block, num_warps=2)
    return out
