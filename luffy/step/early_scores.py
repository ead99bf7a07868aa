"""Responses verified while others are still being made: the GPU does not wait for the verifier's processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from luffy.models.load import decode
from luffy.rewards import Verifier
from luffy.types import Score, Task

Response = tuple[int, Task, Tensor | list[int]]  # its number, the task, its token ids
DECODED_AT_ONCE = 64


class EarlyScores:
    """One thread decodes responses, a part at a time, another scores all that were decoded while it was busy."""

    def __init__(self, verifier: Verifier, tokenizer: Any) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._threads = ThreadPoolExecutor(1, "decoding"), ThreadPoolExecutor(1, "rewards")
        self._decoded: deque[tuple[int, Task, str]] = deque()
        self._calls: list[Future[None]] = []
        self._scores: dict[int, Score] = {}

    def __enter__(self) -> EarlyScores:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)

    def add(self, responses: Sequence[Response]) -> None:
        """Each has a number of its own."""
        for start in range(0, len(responses), DECODED_AT_ONCE):
            part = responses[start : start + DECODED_AT_ONCE]
            self._calls.append(self._threads[0].submit(self._decode, part))

    def in_order(self) -> list[Score]:
        """All scores in the order of their numbers; waits for those that are missing."""
        for call in self._calls:  # one that decodes appends the one that scores
            call.result()
        return [self._scores[number] for number in sorted(self._scores)]

    def _decode(self, part: Sequence[Response]) -> None:
        texts = decode(self._tokenizer, [ids for _, _, ids in part])
        self._decoded.extend((number, task, text) for (number, task, _), text in zip(part, texts, strict=True))
        self._calls.append(self._threads[1].submit(self._score_decoded))

    def _score_decoded(self) -> None:
        decoded = [self._decoded.popleft() for _ in range(len(self._decoded))]
        if decoded:
            scores = self._verifier.score([(task.problem, text, None, task.in_thought) for _, task, text in decoded])
            self._scores |= zip((number for number, _, _ in decoded), scores, strict=True)
