"""A model over KV slots: keys and values in one block with a fixed range per slot, and the runner that fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.errors import UserError
from luffy.models.attention import ExtendLayout, KVSink, Layout, PackedLayout
from luffy.models.forward import forward_hidden, head_weight_bias


class Slots(KVSink, Protocol):
    """A cache of slots. A layout looks at the first ``span`` positions of every slot, at least."""

    slots: int
    capacity: int

    def copy(self, source: int, targets: Sequence[int], length: int) -> None: ...

    def decode_layout(self, positions: Tensor, span: int) -> Layout: ...

    def extend_layout(self, positions: Tensor, span: int) -> Layout: ...


class SlotCache:
    """[2, layers, slots, KV heads, capacity, D], allocated when the first keys show their shape.

    Live slots are kept at the front, so a decoding step reads ``[:rows, :, :span]`` as a view.
    """

    def __init__(self, layers: int, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self._layers = layers
        self._block: Tensor | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
        block = self._block_for(keys, values)
        block[0, layer][slots, :, positions] = keys
        block[1, layer][slots, :, positions] = values

    def read(self, layer: int, rows: int, span: int) -> tuple[Tensor, Tensor]:
        assert self._block is not None
        keys, values = self._block[:, layer, :rows, :, :span]
        return keys, values

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give other slots the first ``length`` positions of ``source``."""
        assert self._block is not None
        stretch = self._block[:, :, source, :, :length]
        for target in targets:
            if target != source:
                self._block[:, :, target, :, :length] = stretch

    def read_slot(self, layer: int, slot: int, span: int) -> tuple[Tensor, Tensor]:
        assert self._block is not None
        keys, values = self._block[:, layer, slot : slot + 1, :, :span]
        return keys, values

    def saved(self, slot: int, length: int) -> Tensor:
        """A copy of the first ``length`` positions of a slot, for ``restore``."""
        assert self._block is not None
        return self._block[:, :, slot, :, :length].clone()

    def restore(self, slot: int, saved: Tensor) -> None:
        assert self._block is not None
        self._block[:, :, slot, :, : saved.shape[3]] = saved

    def decode_layout(self, positions: Tensor, span: int) -> ExtendLayout:
        return ExtendLayout(self, positions[:, None], span)

    def extend_layout(self, positions: Tensor, span: int) -> ExtendLayout:
        return ExtendLayout(self, positions, span)

    def _block_for(self, keys: Tensor, values: Tensor) -> Tensor:
        if keys.shape != values.shape:
            raise UserError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ: unsupported attention")
        _, heads, dim = keys.shape
        if self._block is None:
            # Zeros, not garbage: masked positions still enter products, and 0 * NaN is NaN.
            shape = (2, self._layers, self.slots, heads, self.capacity, dim)
            self._block = torch.zeros(shape, dtype=keys.dtype, device=keys.device)
        if (heads, dim, keys.dtype) != (self._block.shape[3], self._block.shape[5], self._block.dtype):
            raise UserError("attention layers differ in KV heads, head size or dtype: unsupported model")
        return self._block


@dataclass(frozen=True)
class OneSlot:
    """One slot of a cache, which a layout sees as the only one."""

    cache: SlotCache
    slot: int

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
        self.cache.write(layer, keys, values, torch.full_like(slots, self.slot), positions)

    def read(self, layer: int, rows: int, span: int) -> tuple[Tensor, Tensor]:
        return self.cache.read_slot(layer, self.slot, span)


class ModelRunner:
    """Runs ``model`` and stores keys and values in ``cache``."""

    def __init__(self, model: nn.Module, cache: Slots) -> None:
        self._model = model
        self._cache = cache
        self._weight, self._bias = head_weight_bias(model)
        self.device = self._weight.device

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Logits [S, V] after each prompt; its keys and values stay in its slot."""
        layout = PackedLayout([len(ids) for ids in prompts], self.device, self._cache, slots)
        tokens = torch.tensor([token for ids in prompts for token in ids], device=self.device)
        hidden = forward_hidden(self._model, tokens, layout.position_ids, layout)
        return self._logits(hidden[layout.last_tokens])

    def extend(self, tokens: Sequence[int], slot: OneSlot, start: int, span: int) -> Tensor:
        """Logits [V] after tokens from position ``start`` of a slot on, which holds what lies before them."""
        positions = torch.arange(start, start + len(tokens), device=self.device)
        layout = ExtendLayout(slot, positions[None], span)
        hidden = forward_hidden(self._model, torch.tensor(tokens, device=self.device), positions, layout)
        return self._logits(hidden[-1:])[0]

    def decode(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Logits [N, V] after each of the N new tokens of the first slots."""
        return self._logits(forward_hidden(self._model, tokens, positions, layout))

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weight, self._bias)
