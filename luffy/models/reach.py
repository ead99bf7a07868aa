"""Attention layout of a packed row, as kernels expect it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from luffy.types import to_device

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Reach:
    """Stretches of queries over sequences of keys, both end to end; causality and window are aligned to the ends."""

    bounds: tuple[Tensor, Tensor]  # where each begins, and where the last one ends: of queries, of keys
    lengths: tuple[Lengths, Lengths]  # the same on the host
    window: int | None  # tokens that a query sees, its own included
    _parts: dict[Lengths, Reach] = field(default_factory=dict)

    @staticmethod
    def of(asking: Lengths, asked: Lengths, window: int | None, device: torch.device) -> Reach:
        return Reach((bounds_of(asking, device), bounds_of(asked, device)), (asking, asked), window)

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.lengths[0]), max(self.lengths[1])

    def part(self, members: Lengths) -> Reach:
        """Reach of the chosen sequences, laid end to end."""
        if members not in self._parts:
            asking, asked = (tuple(lengths[i] for i in members) for lengths in self.lengths)
            self._parts[members] = Reach.of(asking, asked, self.window, self.bounds[0].device)
        return self._parts[members]


def bounds_of(lengths: Lengths, device: torch.device) -> Tensor:
    """[S + 1] int32: where each sequence starts, and where the last one ends."""
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return to_device(ends, device)


# Query, key and value [tokens, heads, D], who sees whom, scale.
Varlen = Callable[[Tensor, Tensor, Tensor, Reach, float], Tensor]
