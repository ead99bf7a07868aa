"""Which server gets which request: a prompt's samples stay on one server, and no server idles while there is work.

A server takes a prompt's samples one after the other, so that they share its prefix cache, then the next prompt that
no server has begun; when none is left it takes from the longest queue of another server. The requests of a lost server
go back to the queue.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from luffy.rollout.vllm.http_client import ServerLost, ServerTimeout

ATTEMPTS = 3  # of one request that fails on servers which are well otherwise


S = TypeVar("S", bound=Hashable)  # what stands for a server
A = TypeVar("A")  # an answer


class Dispatch(Generic[S]):
    """``keys[i]`` is the prompt of request i. Every method may be called from any thread. ``share``: the requests that
    fall to each server when they are dealt out evenly."""

    def __init__(self, keys: Sequence[Hashable], servers: Sequence[S]) -> None:
        groups: dict[Hashable, deque[int]] = defaultdict(deque)
        for index, key in enumerate(keys):
            groups[key].append(index)
        self._waiting = deque(groups.values())
        self._taken: dict[S, deque[int]] = {server: deque() for server in servers}
        self.servers, self.count = servers, len(keys)
        self._unfinished = len(keys)
        self._tries = [0] * len(keys)
        self._changed = threading.Condition()
        self.share = math.ceil(len(keys) / len(servers))
        self.failure: Exception | None = None
        self.lost: dict[S, str] = {}
        self.resent = 0

    def take(self, server: S) -> int | None:
        """The next request for a server; waits while others are still at work, whose requests may come back. None:
        there will be nothing more."""
        with self._changed:
            while self._unfinished and self.failure is None and server not in self.lost:
                index = self._next(server)
                if index is not None:
                    return index
                self._changed.wait()
            return None

    def _next(self, server: S) -> int | None:
        own = self._taken[server]
        if not own and self._waiting:
            own = self._taken[server] = self._waiting.popleft()
        queue = own or max(self._taken.values(), key=len)
        return queue.popleft() if queue else None

    def done(self, report: Callable[[], None]) -> None:
        """A request is answered. ``report`` is called by one thread at a time."""
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()
            report()

    def retry(self, index: int, error: Exception) -> None:
        """A request failed on a server that is well; after a few times the request is to blame."""
        with self._changed:
            self._tries[index] += 1
            if self._tries[index] >= ATTEMPTS:
                self.failure = self.failure or error
            else:
                self._send_again([index])
            self._changed.notify_all()

    def lose(self, server: S, index: int, error: Exception) -> None:
        """A server is gone: the request it was asked and those it was to be asked go elsewhere."""
        with self._changed:
            self.lost.setdefault(server, str(error))
            self._send_again([index, *self._taken[server]])
            self._taken[server].clear()
            if len(self.lost) == len(self._taken):
                self.failure = self.failure or error
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _send_again(self, indices: Sequence[int]) -> None:
        self.resent += len(indices)
        self._waiting.appendleft(deque(indices))


def ask_all(
    dispatch: Dispatch[S],
    ask: Callable[[S, int], A],
    is_well: Callable[[S], bool],
    slots: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[A]:
    """``ask(server, index)`` for every request of the dispatch, ``slots`` of them at once on each server.

    A request that a server failed at goes to it again where ``is_well`` says so, else to another one; so it does when
    the server let the time for an answer pass, because asked again it would take as long again. Raises what made the
    dispatch fail: ``ServerLost`` when no server is left."""
    answers: dict[int, A] = {}

    def report() -> None:
        if progress is not None:
            progress(len(answers), dispatch.count)

    def serve(server: S) -> None:
        """One thread: ask, answer, next. Whatever goes wrong is carried to the thread that waits for all."""
        while (index := dispatch.take(server)) is not None:
            try:
                answers[index] = ask(server, index)
                dispatch.done(report)
            except ServerLost as error:
                if not isinstance(error, ServerTimeout) and is_well(server):
                    dispatch.retry(index, error)
                else:
                    dispatch.lose(server, index, error)
            except Exception as error:
                dispatch.fail(error)

    threads = [
        threading.Thread(target=serve, args=(server,), daemon=True)
        for _ in range(min(slots, dispatch.share))
        for server in dispatch.servers  # in turns, so that the first server does not take everything
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if dispatch.failure is not None:
        raise dispatch.failure
    return [answers[index] for index in range(dispatch.count)]
