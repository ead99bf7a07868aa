"""Generation over pages that takes requests while it runs, and keeps what conversations have in the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from luffy.rollout.engine import RequestSource
from luffy.rollout.native.paged_cache import pages_for
from luffy.rollout.native.paged_generation import PagedGeneration, PagedMemory, PagedSequence, prompts_of
from luffy.types import Request


@dataclass(frozen=True)
class KeptPages:
    """The tokens of a conversation that have been through the model, and the pages with their keys and values."""

    token_ids: tuple[int, ...]
    pages: list[int]


class PagedConversations(PagedGeneration):
    """Between two turns a conversation has no row and keeps its pages; the next turn prefills nothing but what came
    since. Where pages run out, the conversation that has waited longest loses them and is prefilled again."""

    def __init__(
        self, model: nn.Module, source: RequestSource, memory: PagedMemory, max_rows: int, longest: int,
        prefill_tokens: int,
    ) -> None:  # fmt: skip
        widest, most = pages_for(longest), min(max_rows, source.most)
        self._set_up(model, deque(), memory, most, widest, source.most * widest + most + 1, prefill_tokens)
        self._kept: dict[int, KeptPages] = {}
        self._taken = 0

    def serve(self, source: RequestSource, check: Callable[[Sequence[Request]], None]) -> None:
        """Answer the requests of a source until it has no more; ``check`` refuses those that cannot be answered."""
        while (ready := source.take(wait=self.is_done)) is not None:
            check(ready)
            self._add(ready, source.ended())
            for sequence in self.advance():
                self._keep(sequence)
                source.finish(sequence.index, sequence.completion())

    def _add(self, requests: Sequence[Request], ended: Iterable[int]) -> None:
        for number in ended:
            self._drop(number)
        prompts = prompts_of(requests, self._taken)
        self._taken += len(requests)
        for prompt in prompts:
            conversation = prompt.waiting[0].request.conversation
            kept = None if conversation is None else self._kept.get(conversation)
            if kept is None or conversation is None:
                continue
            count = len(kept.token_ids)
            if prompt.token_ids[:count] == kept.token_ids and count < len(prompt.token_ids):
                prompt.pages, prompt.filled = self._kept.pop(conversation).pages, count
        self._prompts.add(prompts)

    def _retire(self, sequence: PagedSequence) -> None:
        """Its last tokens may still be on their way to the host: ``_keep`` decides about the pages."""
        if sequence.request.conversation is None:
            super()._retire(sequence)

    def _keep(self, sequence: PagedSequence) -> None:
        """Keep the pages of a finished sequence; what they hold beyond its tokens is overwritten by its next turn."""
        conversation = sequence.request.conversation
        if conversation is None or not sequence.pages:
            return
        ids = (*sequence.request.given_ids, *sequence.token_ids[:-1])  # the last one was not fed back
        count = pages_for(len(ids))
        self._kept[conversation] = KeptPages(ids, sequence.pages[:count])
        sequence.pages = sequence.pages[count:]
        self._free_pages(sequence)

    def _drop(self, conversation: int) -> None:
        if conversation in self._kept:
            self._pool.release(self._kept.pop(conversation).pages)

    def _prefill_round(self) -> bool:
        while self._kept and self._prompts.missing > self._pool.free:
            self._drop(next(iter(self._kept)))
        return super()._prefill_round()

    def _preempt(self) -> None:
        if not self._kept:
            self._results.read(keep=0)
            self._compact()
            for sequence in self._results.finished:
                self._keep(sequence)
        if self._kept:
            self._drop(next(iter(self._kept)))
        else:
            super()._preempt()
