"""A paged KV cache: which sequence holds which page (host), and the block of pages (device)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.kernels.paged import PAGE, Angles, attend, splits_for, store
from luffy.models.attention import PackedLayout, causal_varlen, varlen_serves
from luffy.models.forward import causal_lm, head_weight_bias, key_value_shape
from luffy.types import to_device

COPIED_AT_ONCE = 64  # pages
SCRATCH = 0  # rows that only fill up a batch write here; it is never read


class PagePool:
    """Counts the holders of every page: sequences that share a prompt share its full pages."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, SCRATCH, -1))
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        for page in pages:
            self._holders[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


@dataclass(frozen=True)
class CacheShape:
    layers: int
    kv_heads: int
    width: int
    dtype: torch.dtype

    @property
    def page_elements(self) -> int:
        return self.layers * 2 * self.kv_heads * PAGE * self.width

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.dtype.itemsize


def cache_shape(model: nn.Module) -> CacheShape:
    config = causal_lm(model).config
    kv_heads, width = key_value_shape(config)
    weight, _ = head_weight_bias(model)
    return CacheShape(config.num_hidden_layers, kv_heads, width, weight.dtype)


class PagedCache:
    """The block of pages. Its address lies in device memory, where graphs look it up, so the block may be
    dropped between rollouts and taken again."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.address = torch.zeros(1, dtype=torch.int64, device=device)
        self._block: Tensor | None = None

    def allocate(self, pages: int) -> None:
        s = self.shape
        size = (pages, s.layers, 2, s.kv_heads, PAGE, s.width)
        try:
            self._block = torch.empty(size, dtype=s.dtype, device=self.device)
        except torch.OutOfMemoryError:  # free, but fragmented: return the cached blocks and try once more
            torch.cuda.empty_cache()
            self._block = torch.empty(size, dtype=s.dtype, device=self.device)
        self.address.fill_(self._block.data_ptr())

    def release(self) -> None:
        """Leave the memory to the update."""
        self._block = None
        self.address.zero_()

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """A few at a time: what is copied exists twice in between."""
        assert self._block is not None
        for start in range(0, len(sources), COPIED_AT_ONCE):
            part = slice(start, start + COPIED_AT_ONCE)
            source, target = (to_device(torch.tensor(pages[part]), self.device) for pages in (sources, targets))
            self._block[target] = self._block[source]

    def gather(self, layer: int, pages: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, KV heads, D] of tokens, by the page that each lies in and its place there."""
        assert self._block is not None
        block = self._block[:, layer]
        return block[pages, 0, :, places], block[pages, 1, :, places]


class PagedDecodeLayout:
    """One new token for each row of the table; fixed shapes, no host decisions: fit for a CUDA graph. Where ``shared``,
    rows may have the same pages: all new tokens are stored before any row looks. Where there are several new tokens
    for each row of the table, one after the other, ``places`` has the pages [N, P] to which each of them goes."""

    def __init__(
        self, cache: PagedCache, tables: Tensor, rows: Tensor, positions: Tensor, shared: bool = False,
        places: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.calls = 0
        self._cache, self._tables, self._rows, self._positions = cache, tables, rows, positions
        self._shared, self._places = shared or places is not None, tables if places is None else places
        self._splits = splits_for(len(tables), cache.shape.kv_heads, tables.shape[1], cache.device)

    def rotate_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, layer: int, scale: float, window: int | None
    ) -> Tensor:
        return self._store_and_read(layer, q, k, v, scale, window, (cos, sin))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        return self._store_and_read(layer, query, key, value, scale, window, None)

    def _store_and_read(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, angles: Angles | None
    ) -> Tensor:
        cache, stride = self._cache, self._cache.shape.page_elements
        if self._shared:
            store(k, v, cache.address, self._places, self._rows, self._positions, layer, stride, angles)
        return attend(
            q, cache.address, self._tables, self._positions, layer, stride, cache.shape.kv_heads, scale, window,
            self._splits, angles, None if self._shared else (k, v),
        )  # fmt: skip


class PagedSlots:
    """Slots over pages (`luffy.rollout.native.slot_cache.Slots`): each slot has a fixed range of pages.

    Tables and the block's address stay where they are when the block is released and allocated in another size, so
    graphs outlive it. Rows without a slot write to the scratch page.
    """

    def __init__(self, shape: CacheShape, device: torch.device, rows: int, longest: int) -> None:
        self.slots = self.capacity = 0
        self._cache = PagedCache(shape, device)
        self._tables = torch.full((rows, pages_for(longest)), SCRATCH, dtype=torch.int32, device=device)

    def allocate(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        each = pages_for(capacity)
        self._cache.allocate(1 + slots * each)
        self._tables.fill_(SCRATCH)
        own = torch.arange(slots * each, dtype=torch.int32, device=self._cache.device) + SCRATCH + 1
        self._tables[:slots, :each] = own.view(slots, each)

    def release(self) -> None:
        self._cache.release()

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
        stride = self._cache.shape.page_elements
        store(keys, values, self._cache.address, self._tables, slots, positions, layer, stride)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        others = [target for target in targets if target != source]
        self._cache.copy(self._pages(source, length) * len(others), [p for t in others for p in self._pages(t, length)])

    def _pages(self, slot: int, length: int) -> list[int]:
        first = SCRATCH + 1 + slot * pages_for(self.capacity)
        return list(range(first, first + pages_for(length)))

    def decode_layout(self, positions: Tensor, span: int) -> PagedDecodeLayout:
        """Pages are read as far as each sequence goes, whatever the span."""
        return self._layout(self._tables[: len(positions)], positions, shared=False)

    def extend_layout(self, positions: Tensor, span: int) -> PagedDecodeLayout:
        """Several tokens of a slot are as many rows with the same pages: all are stored before any looks."""
        rows, count = positions.shape
        tables = self._tables[:rows, None].expand(-1, count, -1).flatten(0, 1)
        return self._layout(tables, positions.flatten(), shared=True)

    def _layout(self, tables: Tensor, positions: Tensor, shared: bool) -> PagedDecodeLayout:
        rows = torch.arange(len(positions), device=positions.device)
        return PagedDecodeLayout(self._cache, tables, rows, positions, shared)


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a sequence that lies in ``pages``; what is before is there already."""

    pages: Sequence[int]
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class ChunksLayout:
    """Chunked prefill: chunks end to end, each attending causally to what its pages hold and to itself."""

    def __init__(self, cache: PagedCache, chunks: Sequence[Chunk]) -> None:
        self.calls = 0
        self._cache, self._chunks = cache, chunks
        device = cache.device
        lengths = [len(chunk) for chunk in chunks]
        self._packed = PackedLayout(lengths, device)
        self._continues = any(chunk.start for chunk in chunks)
        self.position_ids = to_device(torch.cat([torch.arange(p.start, p.end) for p in chunks]), device)
        self.last_tokens = self._packed.last_tokens
        widest = max(len(chunk.pages) for chunk in chunks)
        table = [list(p.pages) + [SCRATCH] * (widest - len(p.pages)) for p in chunks]
        self._tables = to_device(torch.tensor(table, dtype=torch.int32), device)
        self._rows = to_device(torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(lengths)), device)
        self._ends = [chunk.end for chunk in chunks]
        self._whole = PackedLayout(self._ends, device)
        if self._continues:  # where each sequence lies, from its first token on
            pages = [torch.tensor(chunk.pages).repeat_interleave(PAGE)[: chunk.end] for chunk in chunks]
            self._pages = to_device(torch.cat(pages), device)
            self._places = to_device(torch.cat([torch.arange(end) % PAGE for end in self._ends]), device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        cache = self._cache
        stride = cache.shape.page_elements
        store(key, value, cache.address, self._tables, self._rows, self.position_ids, layer, stride)
        if not self._continues:
            return self._packed.attend(layer, query, key, value, scale, window)
        keys, values = cache.gather(layer, self._pages, self._places)
        if varlen_serves(query):
            return causal_varlen(query, keys, values, self._packed, self._whole, scale, window)
        parts = query.split([len(chunk) for chunk in self._chunks]), keys.split(self._ends), values.split(self._ends)
        return torch.cat([_attend_last(q, k, v, scale, window) for q, k, v in zip(*parts, strict=True)])


def _attend_last(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """The last len(q) tokens [n, H, D] over all [m, KV, D]."""
    at = torch.arange(len(k), device=q.device)
    distance = at[len(k) - len(q) :, None] - at[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    query, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    shares = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scale, enable_gqa=shares)
    return out[0].transpose(0, 1)
