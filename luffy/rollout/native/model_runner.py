"""Tokens to logits: one model over the slots of one cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.models.attention import Layout, PackedLayout
from luffy.models.forward import forward_hidden, head_weight_bias
from luffy.rollout.native.slot_cache import Slots


class ModelRunner:
    """Runs ``model``; the keys and values of what it reads go to ``cache``."""

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

    def decode(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Logits [N, V] after each of the N new tokens of the first slots."""
        return self._logits(forward_hidden(self._model, tokens, positions, layout))

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weight, self._bias)
