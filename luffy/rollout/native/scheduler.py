"""Which sequence is in which slot: requests wait in groups of equal tokens and take slots as they come free."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from luffy.types import Completion, Finish, Request


@dataclass(eq=False)
class PromptGroup:
    """Requests that continue the same tokens: one prefill serves them all."""

    token_ids: tuple[int, ...]
    waiting: deque[SequenceState] = field(default_factory=deque)
    # [V], or [2, V] with a second model: kept from the prefill until the last member has started.
    first_logits: Tensor | None = None


@dataclass(eq=False)
class SequenceState:
    """One response being generated."""

    index: int
    request: Request
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    log_probs: array[float] = field(default_factory=lambda: array("f"))
    finish: Finish | None = None

    @property
    def length(self) -> int:
        """Tokens so far, those of the prompt included: where the next one will stand."""
        return self.request.start + len(self.token_ids)

    def append(self, token: int, log_prob: float) -> None:
        if log_prob != log_prob:
            raise self.nan_logits()
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        sampling = self.request.sampling
        if token in sampling.eos_ids:
            self.finish = "stop"
        elif len(self.token_ids) >= sampling.max_tokens:
            self.finish = "length"

    def nan_logits(self, model: str = "model") -> FloatingPointError:
        return FloatingPointError(
            f"the {model} gave NaN logits for request {self.index} after {self.length} tokens:"
            " its weights hold NaN or infinity"
        )

    def completion(self) -> Completion:
        """Completion of a finished sequence; its tensors share the arrays' memory."""
        assert self.finish is not None
        ids = torch.frombuffer(self.token_ids, dtype=torch.long)
        return Completion(ids, torch.frombuffer(self.log_probs, dtype=torch.float32), self.finish)


@dataclass(frozen=True, eq=False)
class Admission:
    """Sequences to start in ``slots``. ``source`` is a slot that holds the group's prompt already;
    None asks for a prefill."""

    group: PromptGroup
    sequences: tuple[SequenceState, ...]
    slots: tuple[int, ...]
    source: int | None


@dataclass(frozen=True)
class Move:
    """A live sequence that changes its slot, with the number of cached positions it takes along."""

    source: int
    target: int
    length: int


class Scheduler:
    """First come, first served, by group; live slots are always the first ones after `compact`.

    A freed slot goes to the group at the head of the queue before anything moves. So while a group is
    only partly started, some slot still holds its prompt, and no prompt is ever prefilled twice.
    """

    def __init__(self, requests: Sequence[Request], slots: int, state: type[SequenceState] = SequenceState) -> None:
        self._state, self._count = state, 0
        self._queue: deque[PromptGroup] = deque()
        self.add(requests)
        self._slots: list[SequenceState | None] = [None] * slots
        # Whose prompt a slot's cache begins with; outlives the sequence until the slot is reused.
        self._prompts: list[PromptGroup | None] = [None] * slots

    def add(self, requests: Sequence[Request]) -> None:
        """Queue further requests; they are numbered as they come."""
        groups: dict[tuple[int, ...], PromptGroup] = {}
        for index, request in enumerate(requests, start=self._count):
            group = groups.setdefault(request.given_ids, PromptGroup(request.given_ids))
            group.waiting.append(self._state(index, request))
        self._queue.extend(groups.values())
        self._count += len(requests)

    @property
    def is_done(self) -> bool:
        return not self._queue and not any(self._slots)

    @property
    def live(self) -> list[SequenceState]:
        """Sequences by slot. Valid after `compact`."""
        return [sequence for sequence in self._slots if sequence is not None]

    def admit(self, token_budget: int) -> list[Admission]:
        """Fill the free slots as far as one prefill of about ``token_budget`` tokens goes."""
        free = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
        admissions: list[Admission] = []
        while free and self._queue:
            group = self._queue[0]
            source = self._holder(group)
            if source is None:
                if admissions and len(group.token_ids) > token_budget:
                    break
                token_budget -= len(group.token_ids)
            admissions.append(self._assign(group, free, source))
            if not group.waiting:
                self._queue.popleft()
        return admissions

    def _holder(self, group: PromptGroup) -> int | None:
        return next((slot for slot, held in enumerate(self._prompts) if held is group), None)

    def _assign(self, group: PromptGroup, free: list[int], source: int | None) -> Admission:
        """Put as many of the group as there are free slots into them, slots that hold its prompt first."""
        free.sort(key=lambda slot: (self._prompts[slot] is not group, slot))
        count = min(len(free), len(group.waiting))
        slots = tuple(free[:count])
        del free[:count]
        sequences = tuple(group.waiting.popleft() for _ in slots)
        for slot, sequence in zip(slots, sequences, strict=True):
            self._slots[slot], self._prompts[slot] = sequence, group
        return Admission(group, sequences, slots, source)

    @property
    def finished(self) -> list[tuple[int, SequenceState]]:
        """Finished sequences that are still in a slot, with it."""
        return [(slot, s) for slot, s in enumerate(self._slots) if s is not None and s.finish]

    def release_finished(self) -> list[SequenceState]:
        """Remove finished sequences from their slots; what the slots hold stays until they are reused."""
        done = [sequence for sequence in self._slots if sequence is not None and sequence.finish]
        self._slots = [None if s is not None and s.finish else s for s in self._slots]
        return done

    def compact(self) -> list[Move]:
        """Move the last live sequences into the gaps, so that the live ones are the first ones."""
        moves = []
        count = sum(sequence is not None for sequence in self._slots)
        gaps = (slot for slot in range(count) if self._slots[slot] is None)
        strays = (slot for slot in range(len(self._slots) - 1, count - 1, -1) if self._slots[slot] is not None)
        for source, target in zip(strays, gaps, strict=True):
            sequence = self._slots[source]
            assert sequence is not None
            # The newest token has not been through the model yet, so it has no keys to move.
            moves.append(Move(source, target, sequence.length - 1))
            self._slots[target], self._slots[source] = sequence, None
            self._prompts[target], self._prompts[source] = self._prompts[source], None
        return moves
