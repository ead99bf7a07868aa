"""Responses verified while others are still being made: the GPU does not wait for the verifier's processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from luffy.rewards import Verifier
from luffy.train.groups import score_responses
from luffy.types import Problem, Score

Response = tuple[int, Problem, list[int]]  # its number, the problem, its token ids


class EarlyScores:
    """Scores responses in a thread, at once those that came while it was busy."""

    def __init__(self, verifier: Verifier, tokenizer: Any) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._thread = ThreadPoolExecutor(1, "rewards")
        self._added: deque[Response] = deque()
        self._calls: list[Future[None]] = []
        self._scores: dict[int, Score] = {}

    def __enter__(self) -> EarlyScores:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def add(self, responses: Iterable[Response]) -> None:
        """Each has a number of its own."""
        self._added.extend(responses)
        if not self._calls or self._calls[-1].running() or self._calls[-1].done():  # one that waits will take it along
            self._calls.append(self._thread.submit(self._score_added))

    def in_order(self) -> list[Score]:
        """Of all that were added, by their numbers; waits for those that are missing."""
        for call in self._calls:
            call.result()
        return [self._scores[number] for number in sorted(self._scores)]

    def _score_added(self) -> None:
        added = [self._added.popleft() for _ in range(len(self._added))]
        if added:
            scores = score_responses([(problem, ids) for _, problem, ids in added], self._verifier, self._tokenizer)
            self._scores |= zip((number for number, _, _ in added), scores, strict=True)
