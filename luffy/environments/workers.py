"""Calls of many environments at the same time, each with a time limit, in threads that nobody waits for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from luffy.rewards.worker import describe

Done = tuple[Hashable, Any]  # a key and the result of its call, or a Fault
LOOK_S = 1.0  # how long one wait for a result lasts


@dataclass(frozen=True)
class Fault:
    """A call without a result. ``error``: what it raised."""

    kind: Literal["timed_out", "raised"]
    message: str
    error: BaseException | None = None


@dataclass(eq=False)
class _Call:
    key: Hashable
    function: Callable[..., Any]
    args: tuple[Any, ...]
    deadline: float = 0.0
    given_up: bool = False


class Workers(AbstractContextManager["Workers"]):
    """Runs at most ``at_once`` calls; a call that takes longer than ``timeout_s`` is given up, and counts no more.

        workers.submit(episode, environment.reply, turn)
        for key, result in workers.finished(block=True): ...

    A call that was given up goes on in its thread, which no code can end. A function that never lets go of the
    interpreter's lock stops all threads: run such code in a process.
    """

    def __init__(self, at_once: int, timeout_s: float) -> None:
        self._at_once, self._timeout_s = at_once, timeout_s
        self._lock = threading.Lock()  # of all below; a condition for each who waits: a thread, the watch, the caller
        self._submitted, self._began, self._ended = (threading.Condition(self._lock) for _ in range(3))
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._done: list[Done] = []
        self._threads = self._idle = 0  # those that wait or run a call that counts
        self._watched = self._closed = False

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def outstanding(self) -> int:
        """Calls that were submitted and have not ended."""
        with self._lock:
            return len(self._waiting) + len(self._running)

    def submit(self, key: Hashable, function: Callable[..., Any], *args: Any) -> None:
        """Call the function when a thread is free; its time counts from then on. Returns at once."""
        with self._lock:
            if self._closed:
                raise RuntimeError("these workers are closed")
            self._waiting.append(_Call(key, function, args))
            self._staff()
            self._submitted.notify()

    def finished(self, block: bool = False) -> list[Done]:
        """Calls that have ended since the last time, in that order. ``block``: wait for one, if any is under way."""
        with self._lock:
            while block and not self._done and (self._waiting or self._running) and not self._closed:
                self._ended.wait(LOOK_S)  # Ctrl-C just before a wait without end would be heard after it alone
            done, self._done = self._done, []
            return done

    def close(self) -> None:
        """Start no more calls; those that run are given up, and nobody waits for them."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            for call in self._running:
                call.given_up = True
            self._running.clear()
            for waiting in (self._submitted, self._began, self._ended):
                waiting.notify_all()

    def _staff(self) -> None:
        """Have a thread for every call that may run now; the lock is held."""
        while self._idle < len(self._waiting) and self._threads < self._at_once:
            self._threads += 1
            self._idle += 1
            threading.Thread(target=self._work, name="environment", daemon=True).start()
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._watch, name="environment-limits", daemon=True).start()

    def _work(self) -> None:
        """One thread: call after call, until one was given up."""
        while (call := self._next()) is not None:
            if not self._settle(call, _result_of(call)):
                return

    def _next(self) -> _Call | None:
        with self._lock:
            while not self._waiting and not self._closed:
                self._submitted.wait()
            if self._closed:
                return None
            self._idle -= 1
            call = self._waiting.popleft()
            call.deadline = time.monotonic() + self._timeout_s
            self._running.add(call)
            self._began.notify()
            return call

    def _settle(self, call: _Call, result: Any) -> bool:
        """Hand over a result; False if the call was given up meanwhile."""
        with self._lock:
            if call.given_up:
                return False
            self._running.remove(call)
            self._done.append((call.key, result))
            self._idle += 1
            self._ended.notify_all()
            return True

    def _watch(self) -> None:
        """Give up calls that take too long."""
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                for call in [call for call in self._running if call.deadline <= now]:
                    self._give_up(call)
                next_deadline = min((call.deadline for call in self._running), default=None)
                self._began.wait(None if next_deadline is None else min(next_deadline - now, threading.TIMEOUT_MAX))

    def _give_up(self, call: _Call) -> None:
        call.given_up = True
        self._running.remove(call)
        self._threads -= 1
        self._done.append(
            (call.key, Fault("timed_out", f"no answer within {self._timeout_s:g} s (environment.timeout_s)"))
        )
        self._staff()
        self._ended.notify_all()


def _result_of(call: _Call) -> Any:
    try:
        return call.function(*call.args)
    except BaseException as error:  # whatever a user's code raises, exits among it, ends its own episode alone
        return Fault("raised", describe(error), error)
