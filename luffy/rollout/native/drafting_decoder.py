"""Decoding over slots with drafts: where few sequences run, a step verifies several tokens of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from luffy.rollout.native.drafts import Drafter, Drafts, standing
from luffy.rollout.native.scheduler import SequenceState
from luffy.rollout.native.slot_generation import PolicyDecoder, SlotPlan
from luffy.rollout.sampling import SamplingRows, sample


class DraftingDecoder(PolicyDecoder):
    """The plan's slots must have room for ``drafts.tokens - 1`` positions behind a response. The model takes
    ``max_context`` positions."""

    def __init__(self, model: nn.Module, plan: SlotPlan, drafts: Drafts, max_context: int) -> None:
        super().__init__(model, plan)
        self._drafter, self._last_place = Drafter(drafts), max_context - 1

    def start(self, sequences: Sequence[SequenceState], logits: Tensor, rows: SamplingRows, positions: Tensor) -> None:
        super().start(sequences, logits, rows, positions)
        self._drafter.pace.interrupted()

    def step(self, sequences: Sequence[SequenceState]) -> None:
        tokens = self._drafter.pace.tokens_for(len(sequences))
        if tokens > 1:
            self._verify(sequences, tokens)
        else:
            super().step(sequences)
            self._drafter.pace.stepped(len(sequences), 1)
        self._drafter.keep([sequence for sequence in sequences if sequence.finish is not None])

    def _verify(self, sequences: Sequence[SequenceState], tokens: int) -> None:
        """Feed each sequence its newest token and its draft, and append what stands of the tokens drawn there."""
        self._batch = None  # it goes on from other tokens
        drafts = self._drafter.propose(sequences, tokens - 1)
        newest = np.array([[sequence.token_ids[-1]] for sequence in sequences])
        fed = torch.from_numpy(np.concatenate((newest, drafts.clip(min=0)), axis=1)).to(self.device)
        lengths = torch.tensor([sequence.length for sequence in sequences], device=self.device)
        places = lengths[:, None] - 1 + torch.arange(tokens, device=self.device)
        layout = self.cache.extend_layout(places, self._plan.span(max(s.length for s in sequences) + tokens - 1))
        within = places.flatten().clamp(max=self._last_place)  # what is drawn beyond a response's end is dropped
        logits = self._runner.decode(fed.flatten(), within, layout)
        rows = SamplingRows.of([sequence.request for sequence in sequences for _ in range(tokens)], self.device)
        ids, log_probs = (part.view(-1, tokens).cpu() for part in sample(logits, rows, places.flatten() + 1))
        before = sum(len(sequence.token_ids) for sequence in sequences)
        kept = standing(drafts, ids.numpy()).tolist()
        for sequence, count, drawn, chosen in zip(sequences, kept, ids.tolist(), log_probs.tolist(), strict=True):
            for token, log_prob in zip(drawn[:count], chosen[:count], strict=True):
                if sequence.finish is None:
                    sequence.append(token, log_prob)
        taken = sum(len(sequence.token_ids) for sequence in sequences) - before
        self.stats.decode_steps += 1
        self.stats.generated_tokens += taken
        self._drafter.verified(len(sequences), tokens, taken)
