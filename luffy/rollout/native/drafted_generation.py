"""Generation over pages with drafts: where few rows run, the host waits for each pass, since its tokens make the next
draft; where many run, bursts go on as without."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from luffy.rollout.native.drafts import Drafter, Drafts, standing
from luffy.rollout.native.paged_conversations import PagedConversations
from luffy.rollout.native.paged_generation import PagedGeneration, PagedMemory, PagedSequence
from luffy.rollout.sampling import SamplingRows, sample
from luffy.types import to_device


class DraftedGeneration(PagedGeneration):
    """The other arguments are those of the generation that it is."""

    def __init__(self, drafts: Drafts, model: Any, asked: Any, memory: PagedMemory, *sizes: int) -> None:
        super().__init__(model, asked, memory, *sizes)
        self._drafter, self._verifier = Drafter(drafts), memory.verifier(drafts.tokens)
        self._state_is_old = False  # it does not have what passes have drawn
        self._plain_steps = 0  # of the last burst

    def advance(self) -> list[PagedSequence]:
        finished = super().advance()
        self._drafter.keep(finished)
        if self._plain_steps:
            self._drafter.pace.stepped(len(self._rows), self._plain_steps)
        return finished

    def _prefill_rounds(self) -> bool:
        worked = super()._prefill_rounds()
        if worked:
            self._drafter.pace.interrupted()
        return worked

    def _launch(self) -> bool:
        tokens = self._drafter.pace.tokens_for(len(self._rows))
        if tokens > 1:
            self._plain_steps = 0
            return self._verify(tokens)
        if self._state_is_old:
            self._results.read(keep=0)
            self._renew_state()
        before = self.stats.decode_steps
        launched = super()._launch()
        self._plain_steps = self.stats.decode_steps - before
        return launched

    def _verify(self, tokens: int) -> bool:
        """Verify drafts of all rows, after all that is on its way has arrived; whether there was anything to do."""
        arrived = bool(self._results)
        self._results.read(keep=0)
        self._compact()
        self._grow(tokens)
        if not self._rows:
            return arrived
        if self._rows_changed:
            self._upload()
        self._results.finished += self._pass(tokens)
        self._compact()
        return True

    def _pass(self, tokens: int) -> list[PagedSequence]:
        """Feed each row its newest token and its draft, and give it what stands of the tokens drawn there. Returns the
        sequences that ended."""
        sequences = self._rows.sequences
        drafts = self._drafter.propose(sequences, tokens - 1)
        fed = np.empty((len(sequences), 1 + tokens), dtype=np.int64)
        fed[:, 0], fed[:, 1], fed[:, 2:] = *self._newest(), drafts.clip(min=0)
        drawn, logits = self._verifier.run(torch.from_numpy(fed))
        drawn = drawn[:, : len(sequences)]
        if any(sequence.request.sampling.is_filtered for sequence in sequences):
            drawn = _drawn_again(sequences, logits, fed)
        ids, log_probs = drawn.cpu().numpy()
        kept, taken = standing(drafts, ids), 0
        for sequence, count, of_row, chosen in zip(sequences, kept, ids, log_probs, strict=True):
            taken += sequence.receive(of_row[:count].astype(np.int64).tolist(), chosen[:count].tolist())
        self._rows.move(kept)
        self._state_is_old = True
        self.stats.decode_steps += 1
        self.stats.generated_tokens += taken
        self._drafter.verified(len(sequences), tokens, taken)
        return [sequence for sequence in sequences if sequence.finish is not None]

    def _renew_state(self) -> None:
        """Send the newest tokens and their positions to the decoder."""
        state = self._decoder.state
        for target, values in zip((state.positions, state.tokens), self._newest(), strict=True):
            target[: len(values)] = to_device(torch.tensor(values), target.device)
        self._state_is_old = False

    def _newest(self) -> tuple[list[int], list[int]]:
        """Positions and tokens, the newest of each row."""
        sequences = self._rows.sequences
        return [sequence.length - 1 for sequence in sequences], [sequence.token_ids[-1] for sequence in sequences]


class DraftedConversations(DraftedGeneration, PagedConversations):
    """Turns with drafts."""


def _drawn_again(sequences: list[PagedSequence], logits: Tensor, fed: np.ndarray) -> Tensor:
    """[2, B, K]: tokens and log-probs with top-k and top-p, which sort the vocabulary; the graph does not."""
    rows, tokens = len(sequences), fed.shape[1] - 1
    sampling = SamplingRows.of([sequence.request for sequence in sequences for _ in range(tokens)], logits.device)
    places = torch.from_numpy(fed[:, :1] + 1 + np.arange(tokens)).flatten()
    drawn = sample(logits[: rows * tokens], sampling, to_device(places, logits.device))
    return torch.stack([part.double() for part in drawn]).view(2, rows, tokens)


def generation_over_pages(
    drafts: Drafts | None, model: Any, asked: Any, memory: PagedMemory, *sizes: int
) -> PagedGeneration:
    """With drafts, or the plain one."""
    if drafts is None:
        return PagedGeneration(model, asked, memory, *sizes)
    return DraftedGeneration(drafts, model, asked, memory, *sizes)


def conversations_over_pages(
    drafts: Drafts | None, model: Any, source: Any, memory: PagedMemory, *sizes: int
) -> PagedConversations:
    """With drafts, or the plain ones."""
    if drafts is None:
        return PagedConversations(model, source, memory, *sizes)
    return DraftedConversations(drafts, model, source, memory, *sizes)
