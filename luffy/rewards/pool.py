"""A fixed number of worker processes that can be killed without losing anything but one item.

Workers are started by exec, not fork: they work from any thread, beside loaded CUDA libraries and
from scripts without a ``__main__`` guard, and no lock of the parent can be held inside them. A worker
takes its items one after the other and answers each when it is done. So a kill costs exactly the item it was at; what
it had not begun goes to another.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import length_hint
from typing import Any, NamedTuple

from luffy.errors import UserError
from luffy.plugins import NAMED
from luffy.rewards.worker import READ, Setup
from luffy.rewards.worker_process import START_TIMEOUT_S, Item, WorkerProcess

MOST_FAILED_STARTS = 3
# Items in one message. Messages cost more than quick items do; of slow ones each worker gets one at a time.
MOST_AT_ONCE = 32
LONGEST_POLL_MS = (1 << 31) - 1  # then it is asked again
QUICK_S, SLOW_S = 0.005, 0.02  # of all items of a message


class Outcome(NamedTuple):
    """What became of an item: "ok" with the function's value, or "timeout", "crashed" (the process
    died or ran out of memory) or "error" (the function raised), with a one-line message."""

    status: str
    value: Any = None
    message: str = ""


_UNSENDABLE = (pickle.PicklingError, TypeError, AttributeError)


class _Run:
    """The bookkeeping of one ``map``. Items are drawn as workers become free, and one ahead: after a kill,
    the run must know that nothing is left to do, and not wait for the new worker."""

    def __init__(
        self,
        items: Iterable[tuple[Any, ...]],
        workers: int,
        timeout_s: float,
        on_result: Callable[[int, Outcome], None] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        many = 2 * workers * MOST_AT_ONCE
        self.largest_message = max(1, math.ceil(length_hint(items, many) / (2 * workers)))  # two for each worker
        self._items = enumerate(items)
        self._waiting = deque(itertools.islice(self._items, 1))
        self._alone: deque[Item] = deque()  # each goes in a message of its own
        self._on_result = on_result
        self.outcomes: dict[int, Outcome] = {}

    @property
    def exhausted(self) -> bool:
        return not self._waiting and not self._alone

    def draw(self, at_once: int) -> tuple[list[Item], bytes]:
        """The next items for a worker, and the message with them; one that cannot be sent is settled here."""
        if self._alone:
            items = [self._alone.popleft()]
        else:
            self._waiting.extend(itertools.islice(self._items, max(0, at_once + 1 - len(self._waiting))))
            items = [self._waiting.popleft() for _ in range(min(at_once, len(self._waiting)))]
        try:
            return items, _message(items)
        except _UNSENDABLE:
            items = [item for item in items if self._is_sendable(item)]
            return items, _message(items)

    def _is_sendable(self, item: Item) -> bool:
        try:
            return bool(_message([item]))
        except _UNSENDABLE as error:
            self.settle(item[0], Outcome("error", message=f"item cannot be sent to a worker: {error}"))
            return False

    def give_back(self, items: Iterable[Item]) -> None:
        """Items that a worker had not begun."""
        self._waiting.extendleft(reversed(list(items)))

    def send_alone(self, items: Iterable[Item]) -> None:
        """Items of a message that could not be read: which one is to blame shows when each comes alone."""
        self._alone.extend(items)

    def settle(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        if self._on_result is not None:
            self._on_result(len(self.outcomes), outcome)


def _message(items: Sequence[Item]) -> bytes:
    """All at once: what items share, such as their problem, is written once."""
    return pickle.dumps([arguments for _, arguments in items])


class WorkerPool:
    """Calls ``module:function`` on items in killable processes.

    ``map([(1, 2), (3, 4)])`` returns the outcomes of ``function(1, 2)`` and ``function(3, 4)``, in order.
    With ``factory_args`` the path names a factory, called once per process, that returns the function.
    ``memory_bytes`` is what a worker may use beyond its imports; ``preload`` modules are imported first.
    """

    def __init__(
        self,
        function_path: str,
        workers: int = 2,
        timeout_s: float = 8.0,
        memory_bytes: int = 2 << 30,
        preload: Sequence[str] = (),
        factory_args: tuple[Any, ...] | None = None,
    ) -> None:
        if workers < 1:
            raise UserError(f"a worker pool needs at least 1 worker, found workers={workers}")
        if not timeout_s > 0:
            raise UserError(f"a worker pool needs a positive timeout_s, found timeout_s={timeout_s}")
        self.timeout_s = timeout_s
        self._setup = Setup(function_path, factory_args, tuple(preload), memory_bytes, dict(NAMED.folders))
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._closing = False
        self._failed_starts = 0
        self._at_once = 1  # items in a message, as long as there are enough for all workers
        self._workers = [WorkerProcess(self._setup, timeout_s) for _ in range(workers)]
        atexit.register(self.close)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def map(
        self,
        items: Iterable[tuple[Any, ...]],
        on_result: Callable[[int, Outcome], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Outcomes in the order of the items. ``on_result(done, outcome)`` is called as each one ends; ``timeout_s``
        instead of the pool's own."""
        with self._lock:
            self._require_usable()
            run = _Run(items, len(self._workers), timeout_s or self.timeout_s, on_result)
            try:
                while self._feed(run):
                    self._collect(run)
            finally:
                self._replace_busy()
            return [run.outcomes[index] for index in range(len(run.outcomes))]

    def wait_ready(self) -> None:
        """Wait until every worker has loaded the function; a UserError says why one cannot."""
        with self._lock:
            self._require_usable()
            nothing = _Run((), len(self._workers), self.timeout_s)
            while not all(worker.ready for worker in self._workers):
                self._collect(nothing)

    def close(self) -> None:
        """End every worker now. A forked copy of this object must not touch its parent's workers."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._closing = True
        for worker in self._workers:  # wakes a map that runs in another thread, which then lets go of the lock
            worker.kill_process()
        with self._lock:
            for worker in self._workers:
                worker.release()
            self._workers = []

    def _require_usable(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("this worker pool belongs to another process; build one after the fork")
        self._require_open()

    def _require_open(self) -> None:
        if self._closing:
            raise RuntimeError("this worker pool is closed")

    def _feed(self, run: _Run) -> bool:
        """Give every free worker something to do; False when all items are settled."""
        for slot in range(len(self._workers)):
            if self._workers[slot].idle and not self._workers[slot].alive:
                self._replace(slot)  # killed from outside between items: nobody's item is lost
            while not run.exhausted and self._workers[slot].idle:
                self._hand_over(slot, run)
        return not run.exhausted or any(worker.items for worker in self._workers)

    def _hand_over(self, slot: int, run: _Run) -> None:
        items, message = run.draw(min(self._at_once, run.largest_message))
        if not items:
            return
        try:
            self._workers[slot].send(items, message, run.timeout_s)
        except OSError as error:
            self._lose(slot, run, Outcome("crashed", message=f"worker could not take the item: {error}"))

    def _collect(self, run: _Run) -> None:
        waiting = {worker.connection.fileno(): slot for slot, worker in enumerate(self._workers) if not worker.idle}
        if not waiting:
            return
        deadline = min(self._workers[slot].deadline for slot in waiting.values())
        readable = _readable(waiting, max(0.0, deadline - time.monotonic()))
        for connection, slot in waiting.items():
            if connection in readable:
                self._receive(slot, run)
            elif self._workers[slot].deadline <= time.monotonic():
                self._give_up(slot, run)

    def _receive(self, slot: int, run: _Run) -> None:
        worker = self._workers[slot]
        is_starting = not worker.items
        answers = worker.answers()
        now = time.monotonic()
        if answers and not is_starting:
            worker.deadline = now + run.timeout_s
        for outcome in itertools.starmap(Outcome, answers):
            if is_starting:
                self._started(slot, outcome)
            elif outcome.status == READ:
                worker.has_read = True
            elif outcome.status == "crashed" or not worker.has_read:
                self._lose(slot, run, outcome)
            else:
                index, _ = worker.items.popleft()
                if not worker.items:
                    self._note_seconds(worker.size, now - worker.sent)
                run.settle(index, outcome)

    def _note_seconds(self, size: int, seconds: float) -> None:
        """How long a worker took for all items of a message."""
        if seconds < QUICK_S and size >= self._at_once:
            self._at_once = min(2 * self._at_once, MOST_AT_ONCE)
        elif seconds > SLOW_S:
            self._at_once = 1

    def _lose(self, slot: int, run: _Run, outcome: Outcome) -> None:
        """``outcome`` is that of the item a worker was at, or of a message that it could not read. An error there
        leaves the worker as it was; anything else ends it."""
        worker = self._workers[slot]
        (index, _), *others = items = list(worker.items)
        worker.items.clear()
        if others and not worker.has_read:
            run.send_alone(items)
        else:
            run.give_back(others)
            run.settle(index, outcome)
        if outcome.status != "error":
            self._replace(slot)

    def _started(self, slot: int, outcome: Outcome) -> None:
        if outcome.status == "ready":
            self._workers[slot].ready = True
            self._failed_starts = 0
            return
        self._failed_starts += 1
        if outcome.status == "crashed" and self._failed_starts < MOST_FAILED_STARTS:
            self._replace(slot)  # killed while importing, for instance by the out-of-memory killer
            return
        self.close()
        where = "" if outcome.value else f"a worker could not load {self._setup.function_path!r}: "
        raise UserError(where + outcome.message)

    def _give_up(self, slot: int, run: _Run) -> None:
        if not self._workers[slot].items:
            self.close()
            raise RuntimeError(f"a worker did not start within {START_TIMEOUT_S:.0f} s: {self._setup.function_path}")
        self._lose(slot, run, Outcome("timeout", message=f"killed after {run.timeout_s:g} s"))

    def _replace(self, slot: int) -> None:
        self._require_open()
        self._workers[slot].release()
        self._workers[slot] = WorkerProcess(self._setup, self.timeout_s)

    def _replace_busy(self) -> None:
        """After an interrupted run: a late reply must never be taken for the answer to a later item."""
        for slot in range(len(self._workers)):
            if self._workers[slot].items and not self._closing:
                self._replace(slot)


def _readable(descriptors: Iterable[int], timeout_s: float) -> set[int]:
    """Those from which something can be read, or whose other end is gone; waits for one. Called once an item, for
    which `multiprocessing.connection.wait` is slow."""
    watched = select.poll()
    for descriptor in descriptors:
        watched.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in watched.poll(math.ceil(min(1000 * timeout_s, LONGEST_POLL_MS)))}
