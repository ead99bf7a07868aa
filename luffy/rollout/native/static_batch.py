"""Static batching through the model's own forward pass and cache, for models that have no other way here.

A batch starts together and ends with its longest response; prompts are padded on the left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from luffy.errors import UserError
from luffy.models.forward import causal_lm
from luffy.models.plain import runs_plain
from luffy.rollout.engine import EngineStats
from luffy.rollout.native.scheduler import SequenceState
from luffy.rollout.sampling import SamplingRows, sample
from luffy.types import Request


class StaticBatchGeneration:
    """One call of `generate`: batches of at most ``max_slots`` requests."""

    def __init__(self, model: nn.Module, requests: Sequence[Request], max_slots: int) -> None:
        self.stats = EngineStats()
        self._model, self._slots = model, max_slots
        self._device = next(model.parameters()).device
        self._waiting = [SequenceState(index, request) for index, request in enumerate(requests)]

    @staticmethod
    def serves(model: nn.Module) -> bool:
        """Whether this is the only way for the model."""
        return runs_plain(model)

    def close(self) -> None:
        """Release nothing: no state outlives the call."""

    def run(self) -> Iterator[list[SequenceState]]:
        # Like lengths together: less padding.
        order = sorted(self._waiting, key=lambda s: (s.request.sampling.max_tokens, s.length))
        for start in range(0, len(order), self._slots):
            batch = order[start : start + self._slots]
            self._generate(batch)
            yield batch

    def _generate(self, batch: Sequence[SequenceState]) -> None:
        tokens, mask = self._padded(batch)
        rows = SamplingRows.of([sequence.request for sequence in batch], self._device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        last = [sequence.request.start + sequence.request.sampling.max_tokens - 1 for sequence in batch]
        last_places = torch.tensor(last, device=self._device)[:, None]
        cache = None
        self.stats.prefill_tokens += int(mask.sum())
        self.stats.prefilled_prompts += len(batch)
        while not all(sequence.finish for sequence in batch):
            self.stats.decode_steps += cache is not None  # the first pass is the prefill
            model: Any = self._model
            output = model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = _cache_of(output, model)
            # Finished sequences run on with the others, but not beyond their last position, which may be the context's.
            positions = (positions[:, -1:] + 1).minimum(last_places)
            drawn, log_probs = sample(output.logits[:, -1], rows, positions[:, 0])
            self._record(batch, drawn, log_probs)
            tokens = drawn[:, None]
            mask = torch.cat((mask, torch.ones_like(tokens)), dim=1)

    def _padded(self, batch: Sequence[SequenceState]) -> tuple[Tensor, Tensor]:
        longest = max(sequence.length for sequence in batch)
        tokens = [[0] * (longest - s.length) + list(s.request.given_ids) for s in batch]
        mask = [[0] * (longest - s.length) + [1] * s.length for s in batch]
        return torch.tensor(tokens, device=self._device), torch.tensor(mask, device=self._device)

    def _record(self, batch: Sequence[SequenceState], tokens: Tensor, log_probs: Tensor) -> None:
        for sequence, token, log_prob in zip(batch, tokens.tolist(), log_probs.tolist(), strict=True):
            if sequence.finish is None:
                sequence.append(token, log_prob)
                self.stats.generated_tokens += 1


def _cache_of(output: Any, model: Any) -> Any:
    """The model's KV cache; an error for Mamba and other recurrent models, which have none."""
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise UserError(
            f"{type(causal_lm(model)).__name__} keeps no keys and values between tokens (past_key_values), without "
            "which luffy cannot sample from it; choose a transformer model"
        )
    return cache
