"""Work beside other work: what an engine or a tokenizer has finished is scored and saved while it makes the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST_WAITING = 2  # calls: what a kill may cost, and how far an engine may be ahead


class BackgroundWork:
    """Calls, one after the other, in a thread of their own. One that fails raises from the next ``submit`` or at the
    end of the block; a block that breaks off still does what was submitted."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> BackgroundWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self._wait(0)

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        """Waits while too many calls do."""
        self._wait(MOST_WAITING - 1)
        self._waiting.append(self._thread.submit(call, *args))

    def _wait(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()
