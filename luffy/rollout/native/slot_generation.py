"""Generation over KV slots: continuous batching, one step of all live slots at a time.

    Scheduler     which request is in which slot                   (host only)
    SlotDecoder   prompts to first logits, live slots to new tokens
    SlotCache     the keys and values of the slots

A step costs one forward pass over the live slots and one small transfer of the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from luffy.models.forward import causal_lm, text_config
from luffy.rollout.engine import EngineStats, RequestSource
from luffy.rollout.native.scheduler import Admission, PromptGroup, Scheduler, SequenceState
from luffy.rollout.native.slot_cache import ModelRunner, OneSlot, SlotCache, Slots
from luffy.rollout.sampling import SamplingRows, sample
from luffy.types import Request


class Generation(Protocol):
    """One call of `generate`."""

    stats: EngineStats

    def run(self) -> Iterator[Sequence[SequenceState]]:
        """Finished sequences, as they finish: those of one look at the results together, sometimes none."""

    def close(self) -> None:
        """Release what outlives the call."""


# Attention reads cached positions in whole blocks: the vector units like it, and the result then hardly
# depends on the longest neighbour. The exact block is the unit in which the CPU kernel walks the keys.
SPAN_BLOCK = 16
EXACT_SPAN_BLOCK = 512


@dataclass(frozen=True)
class SlotPlan:
    """The slots of one call of `generate`: how many, and how many positions each.

    ``exact``: every step runs with all slots as rows, so that rounding does not depend on how many are live.
    """

    slots: int
    capacity: int
    exact: bool

    @classmethod
    def of(cls, requests: Sequence[Request], max_slots: int, exact: bool, lookahead: int = 0) -> SlotPlan:
        """``lookahead`` is how far beyond a response's last position a step may write."""
        # The last new token is never fed back.
        longest = max(request.start + request.sampling.max_tokens - 1 for request in requests)
        return cls.sized(len(requests), longest + lookahead, max_slots, exact)

    @classmethod
    def sized(cls, most: int, longest: int, max_slots: int, exact: bool) -> SlotPlan:
        """For at most so many sequences at once of at most so many cached positions."""
        return cls(max_slots if exact else min(max_slots, most), _whole_blocks(longest, exact), exact)

    def span(self, tokens: int) -> int:
        """The positions that attention reads for a sequence of so many tokens."""
        return _whole_blocks(tokens, self.exact)

    def idle_rows(self, live: int) -> int:
        """Rows that a step of ``live`` sequences runs besides theirs."""
        return self.slots - live if self.exact else 0

    def cache_for(self, model: nn.Module) -> SlotCache:
        return SlotCache(text_config(causal_lm(model).config).num_hidden_layers, self.slots, self.capacity)


def _whole_blocks(tokens: int, exact: bool) -> int:
    block = EXACT_SPAN_BLOCK if exact else SPAN_BLOCK
    return -(-tokens // block) * block


@dataclass
class DecodeBatch:
    """The live slots as the device sees them."""

    sequences: tuple[SequenceState, ...]
    tokens: Tensor  # [rows] newest token of each slot
    positions: Tensor  # [rows] where that token stands
    sampling: SamplingRows

    @classmethod
    def of(cls, sequences: Sequence[SequenceState], idle_rows: int, device: torch.device) -> DecodeBatch:
        """Idle rows repeat the first sequence's parameters and write to the start of their own free slots."""
        requests = [seq.request for seq in sequences] + [sequences[0].request] * idle_rows
        tokens = [seq.token_ids[-1] for seq in sequences] + [0] * idle_rows
        positions = [seq.length - 1 for seq in sequences] + [0] * idle_rows
        rows = SamplingRows.of(requests, device)
        return cls(tuple(sequences), torch.tensor(tokens, device=device), torch.tensor(positions, device=device), rows)

    def holds(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether these are its sequences, in this order: it need not be made anew then."""
        return list(self.sequences) == list(sequences)


class SlotDecoder(Protocol):
    """The models' part of a `SlotGeneration`. It appends tokens to sequences and counts what it does in ``stats``."""

    caches: Sequence[Slots]  # one per model, all with the same slots
    device: torch.device

    @property
    def stats(self) -> EngineStats: ...

    @property
    def sequence_type(self) -> type[SequenceState]:
        """Class of the scheduler's sequences."""

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Run each prompt into its slot. Returns [S, ...]: what `start` needs of each prompt."""

    def start(self, sequences: Sequence[SequenceState], logits: Tensor, rows: SamplingRows, positions: Tensor) -> None:
        """Append the first token of each sequence; ``logits`` [N, ...] are the rows that `prefill` gave."""

    def step(self, sequences: Sequence[SequenceState]) -> None:
        """Append at least one token to each sequence that has not ended; sequence i is in slot i."""

    def close(self) -> None:
        """The call of `generate` is over: release what outlives this object."""


class PolicyDecoder:
    """Decodes with one model: a token per live slot and step."""

    sequence_type = SequenceState

    def __init__(self, model: nn.Module, plan: SlotPlan) -> None:
        self.stats = EngineStats()
        self._plan = plan
        self.cache = plan.cache_for(model)
        self.caches: Sequence[Slots] = [self.cache]
        self._runner = ModelRunner(model, self.cache)
        self.device = self._runner.device
        self._batch: DecodeBatch | None = None

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        return self._runner.prefill(prompts, slots)

    def extend(self, tokens: Sequence[int], slot: int, start: int) -> Tensor:
        """Logits [V] after tokens that go on with what a slot holds up to position ``start``."""
        self.stats.prefill_tokens += len(tokens)
        return self._runner.extend(tokens, OneSlot(self.cache, slot), start, self._plan.span(start + len(tokens)))

    def start(self, sequences: Sequence[SequenceState], logits: Tensor, rows: SamplingRows, positions: Tensor) -> None:
        self._record(sequences, *sample(logits, rows, positions))

    def step(self, sequences: Sequence[SequenceState]) -> None:
        batch = self._batch
        if batch is None or not batch.holds(sequences):
            batch = self._batch = DecodeBatch.of(sequences, self._plan.idle_rows(len(sequences)), self.device)
        span = self._plan.span(max(sequence.length for sequence in sequences))
        layout = self.cache.decode_layout(batch.positions, span)
        logits = self._runner.decode(batch.tokens, batch.positions, layout)
        batch.positions = batch.positions + 1
        batch.tokens, log_probs = sample(logits, batch.sampling, batch.positions)
        self._record(sequences, batch.tokens, log_probs)
        self.stats.decode_steps += 1

    def _record(self, sequences: Sequence[SequenceState], tokens: Tensor, log_probs: Tensor) -> None:
        """The one transfer of a step: ids and log-probs together (ids are exact in float64)."""
        ids, chosen = torch.stack((tokens.double(), log_probs.double()))[:, : len(sequences)].tolist()
        for sequence, token, log_prob in zip(sequences, ids, chosen, strict=True):
            sequence.append(int(token), log_prob)
        self.stats.generated_tokens += len(sequences)

    def close(self) -> None:
        """The cache goes with this object."""


class SlotGeneration:
    """One call of `generate`: puts requests into slots, and has ``decoder`` run them.

    A prefill takes about ``prefill_tokens`` tokens of prompts at a time.
    """

    def __init__(self, requests: Sequence[Request], decoder: SlotDecoder, prefill_tokens: int) -> None:
        self.stats = decoder.stats
        self._decoder, self._prefill_tokens = decoder, prefill_tokens
        self._scheduler = Scheduler(requests, decoder.caches[0].slots, decoder.sequence_type)

    def run(self) -> Iterator[list[SequenceState]]:
        """Finished sequences, as they finish."""
        while not self._scheduler.is_done:
            yield from self.advance()

    def advance(self) -> Iterator[list[SequenceState]]:
        """Fill free slots and take one step; finished sequences, as they finish."""
        yield from self._fill_slots()
        if live := self._scheduler.live:
            self._decoder.step(live)
            yield self._release_finished()

    def _release_finished(self) -> list[SequenceState]:
        return self._scheduler.release_finished()

    def close(self) -> None:
        self._decoder.close()

    def _fill_slots(self) -> Iterator[list[SequenceState]]:
        """Start waiting requests until every slot is taken; one-token responses end here already."""
        while admissions := self._scheduler.admit(self._prefill_tokens):
            self._prefill([admission for admission in admissions if admission.source is None])
            for admission in admissions:
                source = admission.slots[0] if admission.source is None else admission.source
                self._copy(source, admission.slots, len(admission.group.token_ids))
            self._draw_first_tokens(admissions)
            yield self._release_finished()
        for move in self._scheduler.compact():
            self._copy(move.source, [move.target], move.length)

    def _copy(self, source: int, targets: Sequence[int], length: int) -> None:
        for cache in self._decoder.caches:
            cache.copy(source, targets, length)

    def _prefill(self, admissions: Sequence[Admission]) -> None:
        if not admissions:
            return
        prompts = [admission.group.token_ids for admission in admissions]
        logits = self._decoder.prefill(prompts, [admission.slots[0] for admission in admissions])
        for admission, row in zip(admissions, logits, strict=True):
            admission.group.first_logits = row
        self.stats.prefilled_prompts += len(prompts)
        self.stats.prefill_tokens += sum(map(len, prompts))

    def _draw_first_tokens(self, admissions: Sequence[Admission]) -> None:
        started = [sequence for admission in admissions for sequence in admission.sequences]
        logits = torch.stack([_first_logits(admission.group) for admission in admissions for _ in admission.sequences])
        rows = SamplingRows.of([sequence.request for sequence in started], self._decoder.device)
        positions = torch.tensor([sequence.length for sequence in started], device=self._decoder.device)
        self._decoder.start(started, logits, rows, positions)
        for admission in admissions:
            if not admission.group.waiting:
                admission.group.first_logits = None


@dataclass(frozen=True, eq=False)
class Kept:
    """The tokens of a conversation that have been through the model, with their keys and values."""

    token_ids: tuple[int, ...]
    cache: Tensor

    def begins(self, token_ids: tuple[int, ...]) -> bool:
        return len(self.token_ids) < len(token_ids) and token_ids[: len(self.token_ids)] == self.token_ids


class SlotConversations(SlotGeneration):
    """Between two turns a conversation has no slot: its keys and values wait beside the slots, and the next turn
    prefills nothing but what came since."""

    def __init__(self, decoder: PolicyDecoder, prefill_tokens: int) -> None:
        super().__init__([], decoder, prefill_tokens)
        self._policy, self._cache = decoder, decoder.cache
        self._kept: dict[int, Kept] = {}

    def serve(self, source: RequestSource, check: Callable[[Sequence[Request]], None]) -> None:
        """Answer the requests of a source until it has no more; ``check`` refuses those that cannot be answered."""
        while (ready := source.take(wait=self._scheduler.is_done)) is not None:
            check(ready)
            self.add(ready, source.ended())
            for sequences in self.advance():
                for sequence in sequences:
                    source.finish(sequence.index, sequence.completion())

    def add(self, requests: Sequence[Request], ended: Iterable[int] = ()) -> None:
        """Queue further requests. ``ended``: conversations whose cache is of no more use."""
        self._scheduler.add(requests)
        for conversation in ended:
            self._kept.pop(conversation, None)

    def _release_finished(self) -> list[SequenceState]:
        for slot, sequence in self._scheduler.finished:
            if (conversation := sequence.request.conversation) is not None:
                ids = (*sequence.request.given_ids, *sequence.token_ids[:-1])  # the last one was not fed back
                self._kept[conversation] = Kept(ids, self._cache.saved(slot, len(ids)))
        return super()._release_finished()

    def _prefill(self, admissions: Sequence[Admission]) -> None:
        kept = [(admission, self._kept_for(admission)) for admission in admissions]
        super()._prefill([admission for admission, begun in kept if begun is None])
        for admission, begun in kept:
            if begun is not None:
                slot, start = admission.slots[0], len(begun.token_ids)
                self._cache.restore(slot, begun.cache)
                admission.group.first_logits = self._policy.extend(admission.group.token_ids[start:], slot, start)

    def _kept_for(self, admission: Admission) -> Kept | None:
        """What the cache has of a group's tokens."""
        conversations = (sequence.request.conversation for sequence in admission.sequences)
        found = (self._kept.get(conversation) for conversation in conversations if conversation is not None)
        return next((kept for kept in found if kept is not None and kept.begins(admission.group.token_ids)), None)


def _first_logits(group: PromptGroup) -> Tensor:
    assert group.first_logits is not None
    return group.first_logits
