"""Generation over KV slots that takes requests while it runs, and keeps what conversations have in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from luffy.rollout.engine import RequestSource
from luffy.rollout.native.scheduler import Admission, SequenceState
from luffy.rollout.native.slot_generation import PolicyDecoder, SlotGeneration
from luffy.types import Request


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
