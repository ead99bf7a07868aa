"""Attention over a paged cache: new keys and values go to their pages, one or some queries per sequence read them.

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
def _load_rotated(place, inside, d, cos, sin, width, ROTATE: tl.constexpr):
    """Elements ``d`` of heads; with ROTATE, turned by the token's angles and rounded where `transformers` rounds."""
    value = tl.load(place, mask=inside, other=0.0)
    if ROTATE:
        kind: tl.constexpr = value.dtype
        half = width // 2
        other = tl.load(place + tl.where(d < half, half, -half), mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + d, mask=d < width, other=0.0).to(tl.float32)
        s = tl.load(sin + d, mask=d < width, other=0.0).to(tl.float32)
        along, across = (value.to(tl.float32) * c).to(kind), (other * tl.where(d < half, -s, s)).to(kind)
        value = (along.to(tl.float32) + across.to(tl.float32)).to(kind)
    return value


@triton.jit
def _store(
    k, v, cos, sin, address, tables, rows, positions, layer, page_stride, k_row, v_row, table_width, kv_heads, width,
    ROTATE: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token: its keys, turned first with ROTATE, and values to their place."""
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    position = tl.load(positions + token)
    row = tl.load(rows + token).to(tl.int64)
    page = tl.load(tables + row * table_width + position // PAGE).to(tl.int64)
    side = kv_heads * PAGE * width
    base = tl.load(address).to(tl.pointer_type(k.dtype.element_ty))
    place = base + page * page_stride + layer * 2 * side + (head * PAGE + position % PAGE) * width + d
    inside = (head < kv_heads) & (d < width)
    turn = token * width
    key = _load_rotated(k + token * k_row + head * width + d, inside, d, cos + turn, sin + turn, width, ROTATE)
    tl.store(place, key, mask=inside)
    tl.store(place + side, tl.load(v + token * v_row + head * width + d, mask=inside, other=0.0), mask=inside)


@triton.jit
def _attend(
    q, k, v, cos, sin, address, tables, positions, out, partial, tops, sums, layer, page_stride,
    q_row, k_row, v_row, table_width, scale, window, sharing, kv_heads, width: tl.constexpr,
    ROTATE: tl.constexpr, NEWEST: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sequence, one key head and the ``sharing`` query heads that use it, one of SPLITS stretches of pages.

    A sequence has QUERIES queries, at positions that do not fall, each with its own end and window. With ROTATE
    queries are turned first. With NEWEST the first stretch takes the newest token's key, turned likewise, and value
    from ``k`` and ``v`` and puts them into their page.
    """
    row, kv, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kind: tl.constexpr = q.dtype.element_ty
    position = tl.load(positions + row * QUERIES + QUERIES - 1)
    length = position + 1
    held = position if NEWEST else length  # tokens to be read from pages
    earliest = position if QUERIES == 1 else tl.load(positions + row * QUERIES)
    first = tl.maximum(earliest + 1 - window, 0)
    begin, end = first // PAGE, (held + PAGE - 1) // PAGE
    each = (end - begin + SPLITS - 1) // SPLITS
    begin = begin + split * each
    end = tl.minimum(begin + each, end)
    group, at, d = tl.arange(0, GROUP), tl.arange(0, PAGE), tl.arange(0, WIDTH)
    wide = (d < width)[None, :]
    q_inside = (group[:, None] < QUERIES * sharing) & wide
    if QUERIES == 1:
        heads = row * kv_heads * sharing + kv * sharing + group
        cos += row * width
        sin += row * width
        q_at = q + row * q_row + (kv * sharing + group[:, None]) * width + d[None, :]
    else:
        asking = row * QUERIES + tl.minimum(group // sharing, QUERIES - 1)
        heads = (asking * kv_heads + kv) * sharing + group % sharing
        cos += asking[:, None] * width
        sin += asking[:, None] * width
        q_at = q + asking[:, None] * q_row + (kv * sharing + group[:, None] % sharing) * width + d[None, :]
        ends = tl.load(positions + asking)[:, None] + 1
    query = _load_rotated(q_at, q_inside, d[None, :], cos, sin, width, ROTATE)
    base = tl.load(address).to(tl.pointer_type(kind))
    side = kv_heads * PAGE * width
    base += layer * 2 * side + kv * PAGE * width
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, WIDTH], tl.float32)
    if NEWEST:  # noqa: SIM102 (known when the kernel is compiled)
        if split == 0:
            page = tl.load(tables + row * table_width + position // PAGE).to(tl.int64)
            place = base + page * page_stride + (position % PAGE) * width + d[None, :]
            head = kv * width + d[None, :]
            key = _load_rotated(k + row * k_row + head, wide, d[None, :], cos, sin, width, ROTATE)
            value = tl.load(v + row * v_row + head, mask=wide, other=0.0)
            tl.store(place, key, mask=wide)
            tl.store(place + side, value, mask=wide)
            top = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1) * scale
            total += 1.0
            acc += value.to(tl.float32)
    inner = at[:, None] * width + d[None, :]
    for number in range(begin, end):
        page = tl.load(tables + row * table_width + number).to(tl.int64)
        start = tl.multiple_of(base + page * page_stride, 16)  # read from memory, its alignment must be told
        place = number * PAGE + at
        seen = (place >= first) & (place < held)
        tile = seen[:, None] if width == WIDTH else seen[:, None] & wide
        keys = tl.load(start + inner, mask=tile, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        if QUERIES == 1:
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            shift = new_top
        else:
            scores = tl.where((place[None, :] < ends) & (place[None, :] >= ends - window), scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a page that this query does not see
        decay = tl.exp(top - shift)
        weights = tl.exp(scores - shift[:, None])
        values = tl.load(start + side + inner, mask=tile, other=0.0)
        acc = acc * decay[:, None] + tl.dot(weights.to(kind), values, input_precision=PRECISION)
        total = total * decay + tl.sum(weights, axis=1)
        top = new_top
    if SPLITS == 1:
        tl.store(out + heads[:, None] * width + d[None, :], (acc / total[:, None]).to(kind), mask=q_inside)
    else:
        slot = heads * SPLITS + split
        tl.store(partial + slot[:, None] * width + d[None, :], acc, mask=q_inside)
        tl.store(tops + slot, top, mask=group < QUERIES * sharing)
        tl.store(sums + slot, total, mask=group < QUERIES * sharing)


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


Angles = tuple[Tensor, Tensor]  # cos and sin [N, D] of the rotary embedding


def store(
    k: Tensor, v: Tensor, address: Tensor, tables: Tensor, rows: Tensor, positions: Tensor, layer: int,
    page_stride: int, angles: Angles | None = None,
) -> None:  # fmt: skip
    """Keys, rotated where ``angles`` are given, and values [N, KV heads, D] of tokens at ``positions`` of the sequences
    ``rows`` of the table."""
    k, v = _packed_heads(k), _packed_heads(v)
    tokens, kv_heads, width = k.shape
    _store[(tokens,)](
        k, v, *(angles or (k, k)), address, tables, rows, positions, layer, page_stride, k.stride(0), v.stride(0),
        tables.stride(0), kv_heads, width,
        ROTATE=angles is not None, PAGE=PAGE, HEADS=triton.next_power_of_2(kv_heads),
        WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


def splits_for(rows: int, kv_heads: int, longest_pages: int, device: torch.device) -> int:
    """Stretches per sequence: enough programs to fill the GPU twice, no more than there can be pages."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    wanted = triton.next_power_of_2(triton.cdiv(2 * units, rows * kv_heads))
    return int(min(wanted, triton.next_power_of_2(longest_pages), 32))


def attend(
    q: Tensor, address: Tensor, tables: Tensor, positions: Tensor, layer: int, page_stride: int, kv_heads: int,
    scale: float, window: int | None, splits: int, angles: Angles | None = None,
    newest: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """q [N, heads, D]: attention of query i over positions 0 to ``positions[i]`` of its sequence. A row of the table
    has the pages of a sequence, which has one query, or N / rows of them, one after the other.

    Where ``angles`` are given, queries are rotated first, and new keys too. ``newest``: keys and values
    [N, KV heads, D] of the last positions, which are in their pages afterwards; without it they are there already, as
    they must be where a sequence has several queries.
    """
    q = _packed_heads(q)
    k, v = (q, q) if newest is None else map(_packed_heads, newest)
    rows, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block = max(16, triton.next_power_of_2(width))  # tl.dot takes no smaller ones
    slots = rows * heads * splits if splits > 1 else 0
    partial, tops, sums = (q.new_empty(slots * each, dtype=torch.float32) for each in (width, 1, 1))
    sharing, queries = heads // kv_heads, rows // len(tables)
    group = max(16, triton.next_power_of_2(queries * sharing))
    no_window = 1 << 30
    _attend[(len(tables), kv_heads, splits)](
        q, k, v, *(angles or (q, q)), address, tables, positions, out, partial, tops, sums, layer, page_stride,
        q.stride(0), k.stride(0), v.stride(0), tables.stride(0), scale, window or no_window, sharing, kv_heads, width,
        ROTATE=angles is not None, NEWEST=newest is not None, QUERIES=queries, SPLITS=splits, PAGE=PAGE, GROUP=group,
        WIDTH=block, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4 if group <= 64 else 8,
        num_stages=3 if queries == 1 else 2,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows * heads,)](partial, tops, sums, out, width, SPLITS=splits, WIDTH=block, num_warps=1)
    return out
