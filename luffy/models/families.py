"""Attention over prompts that lie in the row once, each before all the responses to it.

Norms, linear layers and MLP see a shared prompt once. Attention alone needs it before every response: keys and
values are copied into whole sequences, and the numbers are those of samples laid out one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from luffy.models.attention import Layout, PackedLayout, causal_varlen, varlen_serves
from luffy.types import Family, to_device


def layout_of(families: Sequence[Family], device: torch.device | str) -> Layout:
    """Layout of families in one row; without a shared prompt nothing is copied."""
    if all(len(family.responses) == 1 for family in families):
        return PackedLayout([family.tokens for family in families], device)
    return FamilyLayout(families, device)


class FamilyLayout:
    """Families end to end: a prompt, then its responses, each blind to the others.

    Queries stay where they are. The first response follows its prompt in the row, so the two are one stretch of
    queries; every further response is one of its own, whose keys begin with the prompt's.
    """

    def __init__(self, families: Sequence[Family], device: torch.device | str) -> None:
        self.calls = 0
        asking, rows = zip(*_sequences(families), strict=True)
        self._stretches = PackedLayout(asking, device)
        self._whole = PackedLayout([len(row) for row in rows], device)
        self._copies = Copies(torch.cat(rows), sum(asking), device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self._copies.of(key), self._copies.of(value)
        if varlen_serves(query):
            return causal_varlen(query, keys, values, self._stretches, self._whole, scale, window)
        out = self._whole.attend(layer, self._copies.of(query), keys, values, scale, window)
        return out.index_select(0, self._copies.first)


def _sequences(families: Sequence[Family]) -> Iterator[tuple[int, Tensor]]:
    """Length of each stretch of queries, and the rows of its whole sequence; empty responses have none."""
    start = 0
    for family in families:
        prompt = torch.arange(start, start + family.prompt)
        start += family.prompt
        for i, n in enumerate(family.responses):
            if i == 0 or n:
                yield n + (family.prompt if i == 0 else 0), torch.cat([prompt, torch.arange(start, start + n)])
            start += n


class Copies:
    """Rows copied to several places, and the way back for gradients: the sum over a row's places, always in the
    same order, where adding into the row from all places at once would not give the same bits twice on a GPU."""

    def __init__(self, rows: Tensor, count: int, device: torch.device | str) -> None:
        """``rows[i]`` is the row that goes to place i; each of the ``count`` rows goes somewhere."""
        times = torch.bincount(rows, minlength=count)
        places = rows.argsort(stable=True)  # row by row
        starts = times.cumsum(0) - times
        several = (times > 1).nonzero().flatten()
        nth = torch.arange(int(times.max()))
        absent = nth[None, :] >= times[several, None]
        at = (starts[several, None] + nth[None, :]).clamp(max=len(rows) - 1)
        self.rows = to_device(rows, device)
        self.first = to_device(places[starts], device)
        self._several = to_device(several, device)
        self._places = to_device(places[at], device)
        self._absent = to_device(absent[:, :, None, None], device) if absent.any() else None

    def of(self, flat: Tensor) -> Tensor:
        """[N, H, D] -> [places, H, D]."""
        copied: Tensor = _Copied.apply(flat, self)  # type: ignore[no-untyped-call]
        return copied

    def summed(self, gradient: Tensor) -> Tensor:
        """[places, H, D] -> [N, H, D]; half precision is summed in float32."""
        out = gradient.index_select(0, self.first)
        parts = gradient[self._places]
        if self._absent is not None:
            parts.masked_fill_(self._absent, 0)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return out.index_copy_(0, self._several, parts.sum(1, dtype=wide).to(gradient.dtype))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return flat.index_select(0, copies.rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.summed(gradients[0]), None
