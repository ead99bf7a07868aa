"""Drafts: tokens that a response may go on with, taken from texts of the same problem.

    traces, the prompt, responses of this call and of earlier ones, the rows that run    texts
    DraftIndex                                                                           where they went on
    a pass verifies                                                                      the draft, token by token

A pass feeds a row its newest token and the draft behind it, and draws a token at each of these places with the noise
that the place has anyway. As long as the drawn token is the draft's, the next place saw what it would have seen one
step later, and its token stands. So drafts change no token, up to rounding, and whatever texts there are, the samples
are the same.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from luffy.metrics import Mean, Metric, Sum
from luffy.rollout.native.draft_index import BEFORE, BYTES, LONGEST_DRAFT, MOST, Chunk, DraftIndex, Ids, Numbers
from luffy.rollout.native.draft_pace import Pace
from luffy.rollout.native.scheduler import SequenceState

if TYPE_CHECKING:
    from luffy.rollout.native.slot_generation import PolicyDecoder, SlotPlan

KEPT_TEXTS = 32  # of a problem
GROWTH = 16  # tokens of a row, before the index hears of them
SMALL = 8192  # tokens that are cheap to sort again

Key = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Text:
    tokens: Ids
    number: int  # in the order of arrival


class DraftStore:
    """Responses by the prompt of their problem, within ``limit`` bytes: those of the problem that waited longest are
    dropped first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._texts: OrderedDict[Key, list[Text]] = OrderedDict()
        self._arrived = 0

    def texts(self, key: Key) -> list[Text]:
        return self._texts.get(key, [])

    def add(self, key: Key, tokens: Ids, given: int) -> int:
        """Keep a response; returns its number. One that goes on after ``given`` tokens takes the place of its
        beginning, if that is here."""
        texts = self._texts.setdefault(key, [])
        self._texts.move_to_end(key)
        begun = (i for i, text in enumerate(texts) if given and np.array_equal(text.tokens, tokens[: len(text.tokens)]))
        place = next(begun, 0 if len(texts) == KEPT_TEXTS else None)
        if place is not None:
            self.bytes -= texts.pop(place).tokens.nbytes
        self._arrived += 1
        texts.append(Text(tokens, self._arrived))
        self.bytes += tokens.nbytes
        while self.bytes > self.limit:
            _, dropped = self._texts.popitem(last=False)
            self.bytes -= sum(text.tokens.nbytes for text in dropped)
        return self._arrived


class Drafts:
    """What an engine keeps between calls. A pass verifies ``tokens`` tokens of a sequence, or half as many where more
    run. ``always``: without a look at whether it pays."""

    def __init__(self, tokens: int = 8, memory_mb: int = 256, always: bool = False) -> None:
        assert 2 <= tokens <= LONGEST_DRAFT
        half = memory_mb << 19  # bytes
        self.store, self.index_bytes = DraftStore(half), half
        self.tokens = tokens
        self.pace = Pace(tokens, always, time.perf_counter)
        self._passes = self._rows = self._kept = 0

    def count(self, rows: int, kept: int) -> None:
        self._passes, self._rows, self._kept = self._passes + 1, self._rows + rows, self._kept + kept

    def slot_decoder(self, model: nn.Module, plan: SlotPlan, max_context: int) -> PolicyDecoder:
        """Decodes over slots with these drafts."""
        from luffy.rollout.native.drafting_decoder import DraftingDecoder

        return DraftingDecoder(model, plan, self, max_context)

    def metrics(self) -> dict[str, Metric]:
        """Metrics of the calls since the last time."""
        passes, rows, kept = self._passes, self._rows, self._kept
        self._passes = self._rows = self._kept = 0
        return {"rollout/accepted_per_pass": Mean(kept, rows), "rollout/draft_passes": Sum(passes)}


@dataclass(eq=False)
class Followed:
    """A sequence that runs. Its text begins with the last tokens of the prompt; ``heard``: how many of its tokens the
    index has, those of the prompt included."""

    problem: int
    sequence: SequenceState
    given: Key
    heard: int

    @classmethod
    def of(cls, problem: int, sequence: SequenceState) -> Followed:
        request = sequence.request
        head = request.prompt_ids[-MOST:]
        return cls(problem, sequence, head + request.prefix_ids, len(head))

    def __post_init__(self) -> None:
        self.head = self.heard  # tokens of the prompt

    @property
    def length(self) -> int:
        return len(self.given) + len(self.sequence.token_ids)

    def newest(self) -> list[int]:
        """The last MOST tokens."""
        own = self.sequence.token_ids[-MOST:].tolist()
        if (missing := MOST - len(own)) == 0:
            return own
        before = self.given[-missing:]
        return [*[BEFORE] * (missing - len(before)), *before, *own]

    def tokens(self, start: int = 0) -> Ids:
        """The text from ``start`` on."""
        own = self.sequence.token_ids[max(start - len(self.given), 0) :]
        drawn = np.frombuffer(own, dtype=np.int64).astype(np.int32)
        return drawn if start >= len(self.given) else np.concatenate((_ids(self.given[start:]), drawn))

    def unheard(self) -> Chunk:
        start, known = max(self.heard - MOST, 0), self.heard
        self.heard = self.length
        return Chunk(self.problem, self.tokens(start), known - start)


class Drafter:
    """Drafts for the rows of one call of `generate`."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts, self.pace = drafts, drafts.pace
        self._numbers: dict[Key, int] = {}  # of problems
        self._followed: dict[SequenceState, Followed] = {}
        # What is in the index: numbers of the store's texts, and problems with their prompt and traces.
        self._heard: set[int] = set()
        self._given: set[int] = set()
        # Two, so that what is new is soon there and not all is sorted again.
        self._old, self._new = DraftIndex([]), DraftIndex([])
        self._chunks: list[Chunk] = []  # of the new one

    def propose(self, sequences: Sequence[SequenceState], count: int) -> Ids:
        """[B, count]: what each sequence may go on with; NONE where nothing is known."""
        rows = [self._followed.get(sequence) or self._follow(sequence) for sequence in sequences]
        grown = sum(row.length - row.heard for row in rows)
        if any(row.heard == row.head for row in rows) or grown >= max(GROWTH * len(rows), len(self._new) // 4):
            self._learn(rows)
        problems = np.array([row.problem for row in rows])
        contexts = _ids([row.newest() for row in rows])
        matched, drafts = self._new.find(problems, contexts, count)
        matched_old, drafts_old = self._old.find(problems, contexts, count)
        return np.where((matched >= matched_old)[:, None], drafts, drafts_old)

    def verified(self, rows: int, tokens: int, taken: int) -> None:
        """A pass over ``tokens`` tokens of each row has been made, and the rows took so many together."""
        self.drafts.count(rows, taken)
        self.pace.verified(rows, tokens, taken / rows)

    def keep(self, finished: Sequence[SequenceState]) -> None:
        """Put finished responses into the store."""
        for sequence in finished:
            request, followed = sequence.request, self._followed.pop(sequence, None)
            tokens = (followed or Followed.of(0, sequence)).tokens()
            number = self.drafts.store.add(request.prompt_ids, tokens, len(request.prefix_ids))
            if followed is not None:
                self._heard.add(number)

    def _follow(self, sequence: SequenceState) -> Followed:
        problem = self._numbers.setdefault(sequence.request.prompt_ids, len(self._numbers))
        self._followed[sequence] = followed = Followed.of(problem, sequence)
        return followed

    def _learn(self, rows: Sequence[Followed]) -> None:
        """Take in what rows and their problems have that the index has not heard of."""
        self._chunks += self._unheard(rows)
        if sum(len(chunk.tokens) for chunk in self._chunks) <= max(SMALL, len(self._old) // 2):
            self._new = DraftIndex(self._within_limit(self._chunks))
            return
        self._heard.clear()
        self._given.clear()
        for row in rows:
            row.heard = row.head
        self._old = DraftIndex(self._within_limit(self._unheard(rows)))
        self._new, self._chunks = DraftIndex([]), []

    def _unheard(self, rows: Sequence[Followed]) -> list[Chunk]:
        chunks: list[Chunk] = []
        for row in {row.problem: row for row in rows}.values():
            request, problem = row.sequence.request, row.problem
            if problem not in self._given:
                chunks.append(Chunk(problem, _ids(request.prompt_ids)))
                chunks += [Chunk(problem, _ids((*row.given[: row.head], *ids)), row.head) for ids in request.drafts]
                self._given.add(problem)
            texts = [text for text in self.drafts.store.texts(request.prompt_ids) if text.number not in self._heard]
            chunks += [Chunk(problem, text.tokens, row.head) for text in texts]
            self._heard |= {text.number for text in texts}
        return [*chunks, *(row.unheard() for row in rows)]

    def _within_limit(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The last chunks, as many as memory may hold; each of the two indexes has half of it."""
        ends = np.cumsum([len(chunk.tokens) + MOST for chunk in reversed(chunks)])
        count = int(np.searchsorted(ends, self.drafts.index_bytes // (2 * BYTES), side="right"))
        return list(chunks[len(chunks) - count :])


def _ids(tokens: Sequence[Any]) -> Ids:
    return np.array(tokens, dtype=np.int32)


def standing(drafts: Ids, drawn: Numbers) -> Numbers:
    """[B] how many of the tokens drawn [B, K] stand, where ``drafts`` [B, K - 1] were fed behind the newest token: up
    to the first that differs, which stands too."""
    kept: Numbers = 1 + np.logical_and.accumulate(drafts == drawn[:, :-1], axis=1).sum(axis=1)
    return kept
