"""The models' part of a round: k proposals of the draft, and the second model's logits at each of them.

A function of tensors alone: no value is read back and no shape depends on one. So on a GPU these lines are captured
as a graph (`luffy.rollout.overrides.round_graphs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.models.attention import Layout
from luffy.models.forward import causal_lm, text_config
from luffy.rollout.native.slot_cache import ModelRunner, Slots
from luffy.rollout.sampling import tempered

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]  # log-probs [B, V], seeds [B], positions [B] -> tokens [B]


class RoundRows(NamedTuple):
    """Position of each sequence, one row each."""

    tokens: Tensor  # [B] the newest token
    positions: Tensor  # [B] where it stands
    seeds: Tensor  # [B]
    temperatures: Tensor  # [B, 1]


class Proposals(NamedTuple):
    tokens: Tensor  # [B, k]
    log_probs: Tensor  # [B, k, V] float32, the draft's
    second_logits: Tensor  # [B, k, V]


class SecondModelRunner(ModelRunner):
    """Runs a model that has fewer tokens than the policy, over the policy's vocabulary: what the policy has beyond
    is padding, has probability 0 here, and is read as the last token should the policy ever write it."""

    def __init__(self, model: nn.Module, cache: Slots, vocabulary: int) -> None:
        super().__init__(model, cache)
        self._own = text_config(causal_lm(model).config).vocab_size
        self._missing = vocabulary - self._own

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        return self._widened(super().prefill(prompts, slots))

    def decode(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        readable = tokens.clamp(max=self._own - 1) if self._missing else tokens
        return self._widened(super().decode(readable, positions, layout))

    def _widened(self, logits: Tensor) -> Tensor:
        return F.pad(logits, (0, self._missing), value=-math.inf) if self._missing else logits


class Round:
    """Both models over the first rows of their caches, the draft's cache first."""

    def __init__(
        self, draft: nn.Module, second: nn.Module, caches: Sequence[Slots], max_context: int, draw: Draw
    ) -> None:
        self.caches = caches
        self._draft_cache, self._second_cache = caches
        self.vocabulary: int = text_config(causal_lm(draft).config).vocab_size
        self.draft = ModelRunner(draft, self._draft_cache)
        self.second = SecondModelRunner(second, self._second_cache, self.vocabulary)
        self.draw = draw
        self._last_place = max_context - 1

    def __call__(self, rows: RoundRows, spans: Sequence[int]) -> Proposals:
        """One proposal per span; ``spans`` are the cached positions that each step looks at."""
        fed, proposed, log_probs = self._propose(rows, spans)
        places = rows.positions[:, None] + torch.arange(len(spans), device=fed.device)
        layout = self._second_cache.extend_layout(places, spans[-1])
        logits = self.second.decode(fed.flatten(), self._within_context(places.flatten()), layout)
        return Proposals(proposed, log_probs, logits.view(*fed.shape, -1))

    def _propose(self, rows: RoundRows, spans: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens fed [B, k], tokens proposed [B, k] and the draft's log-probs [B, k, V]."""
        tokens, positions = [rows.tokens], rows.positions
        log_probs: list[Tensor] = []
        for span in spans:
            layout = self._draft_cache.decode_layout(positions, span)
            logits = self.draft.decode(tokens[-1], self._within_context(positions), layout)
            positions = positions + 1
            log_probs.append(tempered(logits, rows.temperatures))
            tokens.append(self.draw(log_probs[-1], rows.seeds, positions))
        every = torch.stack(tokens, dim=1)
        return every[:, :-1], every[:, 1:], torch.stack(log_probs, dim=1)

    def _within_context(self, positions: Tensor) -> Tensor:
        """Proposals beyond a response's end may stand beyond the context; they are thrown away, but a
        table of positions must not be read past its end for them."""
        return positions.clamp(max=self._last_place)
