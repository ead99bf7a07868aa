"""A fixed number of worker processes; killing one costs exactly the item it was working on.

Workers are started by exec, not fork: they work from any thread, next to loaded CUDA libraries and from scripts without
a ``__main__`` guard, and inherit no lock. A worker answers its items one after the other; items it had not begun when
it was killed go to another.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import json
import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from luffy.errors import UserError
from luffy.plugins import NAMED
from luffy.rewards.worker import Answer, Setup, unpacked

START_TIMEOUT_S = 180.0  # long, because an importing worker may share a busy machine with a training run
MOST_FAILED_STARTS = 3
MOST_AT_ONCE = 32  # items in one message: messages cost more than quick items do; slow items go one at a time
QUICK_S, SLOW_S = 0.005, 0.02  # time for all items of a message
READ_BYTES = 1 << 16
LONGEST_POLL_MS = (1 << 31) - 1  # then it is asked again
LONGEST_BLOCK_S = 1 << 31
UNSENDABLE = (pickle.PicklingError, TypeError, AttributeError)

# One thread each: the pool is the parallelism. Plain Python integers: with gmpy2 installed, sympy
# computes (10^9)! in one C call that no alarm can interrupt, so each such answer would cost a hard kill.
_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "SYMPY_GROUND_TYPES": "python",
    "MPMATH_NOGMPY": "1",
}

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from luffy.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)

Item = tuple[int, bytes]  # its index, and its pickled arguments


class Outcome(NamedTuple):
    """Result of an item: "ok" with the function's value, or "timeout", "crashed" (the process died or ran out of
    memory) or "error" (the function raised), with a one-line message."""

    status: str
    value: Any = None
    message: str = ""


class _Run:
    """State of one ``map``: items that wait for a worker, and the outcomes of the others by index."""

    def __init__(self, items: Iterable[tuple[Any, ...]], workers: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.waiting: deque[Item] = deque()
        self.outcomes: dict[int, Outcome] = {}
        for index, arguments in enumerate(items):
            try:
                self.waiting.append((index, pickle.dumps(arguments)))
            except UNSENDABLE as error:
                self.outcomes[index] = Outcome("error", message=f"item cannot be sent to a worker: {error}")
        self.largest_message = max(1, math.ceil(len(self.waiting) / (2 * workers)))  # two for each worker


class WorkerProcess:
    """The parent's side of one worker process."""

    def __init__(self, setup: Setup, timeout_s: float) -> None:
        self.ready = False
        self.items: deque[Item] = deque()  # sent, not answered
        self.size, self.sent = 0, 0.0  # number of items and time of the last message
        self._unread = b""  # the beginning of an answer
        self._ended = False
        self.deadline = time.monotonic() + START_TIMEOUT_S
        ours, theirs = (_above_stdio(end.detach()) for end in socket.socketpair())
        lifeline_read, self._lifeline = (_above_stdio(end) for end in os.pipe())
        self.connection = Connection(ours)
        _bound_blocking(ours, timeout_s)
        try:
            self.process = _start_process(theirs, lifeline_read)
        finally:
            os.close(theirs)
            os.close(lifeline_read)
        with suppress(OSError):  # a process that died at once is reported when it is read from
            self.connection.send(setup)

    @property
    def idle(self) -> bool:
        """Whether it is ready and has no item."""
        return self.ready and not self.items

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def send(self, items: list[Item], timeout_s: float) -> None:
        """Send items; the first must be answered within ``timeout_s``."""
        self.items.extend(items)
        self.size = len(items)
        self.connection.send([arguments for _, arguments in items])
        self.sent = time.monotonic()
        self.deadline = self.sent + timeout_s

    def answers(self) -> list[Answer]:
        """Answers that have arrived complete, in order; "crashed" when the process is gone. One read takes many."""
        try:
            arrived = os.read(self.connection.fileno(), READ_BYTES)
        except OSError:
            arrived = b""
        if not arrived:
            return [("crashed", None, f"worker died with {self.exit_reason()}")]
        answers, self._unread = unpacked(self._unread + arrived)
        return answers

    def exit_reason(self) -> str:
        """Signal or exit code with which the process ended."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its connection closed"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def kill_process(self) -> None:
        """End the process and whatever it started (it leads its own process group), also when it ended by itself."""
        if not self._ended:
            self._ended = True
            with suppress(ProcessLookupError, PermissionError):  # no process is left; on macOS a zombie may be
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def release(self) -> None:
        """End the process and close its channels."""
        self.kill_process()
        if not self.connection.closed:
            self.connection.close()
            os.close(self._lifeline)


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """Calls ``module:function`` on items in killable processes.

    ``map([(1, 2), (3, 4)])`` returns the outcomes of ``function(1, 2)`` and ``function(3, 4)``, in order.
    With ``factory_args`` the path names a factory, called once per process, that returns the function.
    A worker may use ``memory_bytes`` beyond its imports.
    """

    def __init__(
        self,
        function_path: str,
        workers: int = 2,
        timeout_s: float = 8.0,
        memory_bytes: int = 2 << 30,
        factory_args: tuple[Any, ...] | None = None,
    ) -> None:
        if workers < 1:
            raise UserError(f"a worker pool needs at least 1 worker, found workers={workers}")
        if not timeout_s > 0:
            raise UserError(f"a worker pool needs a positive timeout_s, found timeout_s={timeout_s}")
        self.timeout_s = timeout_s
        self._setup = Setup(function_path, factory_args, memory_bytes, dict(NAMED.folders))
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._closing = False
        self._failed_starts = 0
        self._at_once = 1  # items in a message, as long as there are enough for all workers
        self._workers = [WorkerProcess(self._setup, timeout_s) for _ in range(workers)]
        atexit.register(self.close)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def map(self, items: Iterable[tuple[Any, ...]], timeout_s: float | None = None) -> list[Outcome]:
        """Outcomes in the order of the items; ``timeout_s`` replaces the pool's."""
        with self._lock:
            self._require_usable()
            run = _Run(items, len(self._workers), timeout_s or self.timeout_s)
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
                self._replace(slot)  # killed from outside between items: no item is lost
            while run.waiting and self._workers[slot].idle:
                self._hand_over(slot, run)
        return bool(run.waiting) or any(worker.items for worker in self._workers)

    def _hand_over(self, slot: int, run: _Run) -> None:
        at_once = min(self._at_once, run.largest_message, len(run.waiting))
        items = [run.waiting.popleft() for _ in range(at_once)]
        try:
            self._workers[slot].send(items, run.timeout_s)
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
            elif outcome.status == "crashed":
                self._lose(slot, run, outcome)
            else:
                index, _ = worker.items.popleft()
                if not worker.items:
                    self._note_seconds(worker.size, now - worker.sent)
                run.outcomes[index] = outcome

    def _note_seconds(self, size: int, seconds: float) -> None:
        """Adapt the size of messages to the time a worker took for all items of one."""
        if seconds < QUICK_S and size >= self._at_once:
            self._at_once = min(2 * self._at_once, MOST_AT_ONCE)
        elif seconds > SLOW_S:
            self._at_once = 1

    def _lose(self, slot: int, run: _Run, outcome: Outcome) -> None:
        """Settle the item a worker was working on, and start another worker."""
        (index, _), *others = self._workers[slot].items
        self._workers[slot].items.clear()
        run.waiting.extendleft(reversed(others))
        run.outcomes[index] = outcome
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
        """Replace workers that are busy after an interrupted run: a late reply must not answer a later item."""
        for slot in range(len(self._workers)):
            if self._workers[slot].items and not self._closing:
                self._replace(slot)


def _readable(descriptors: Iterable[int], timeout_s: float) -> set[int]:
    """Wait for descriptors that can be read or whose other end is gone; `multiprocessing.connection.wait` is slower."""
    watched = select.poll()
    for descriptor in descriptors:
        watched.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in watched.poll(math.ceil(min(1000 * timeout_s, LONGEST_POLL_MS)))}


def _start_process(connection_fd: int, lifeline_fd: int) -> subprocess.Popen[bytes]:
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT, str(connection_fd), str(lifeline_fd), path],
        pass_fds=(connection_fd, lifeline_fd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **_WORKER_ENVIRONMENT},
        start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
    )


def _above_stdio(fd: int) -> int:
    """Descriptor above 2: with stdin closed a new one may be 0, which the child's stdin would overwrite."""
    if fd > 2:
        return fd
    moved: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _bound_blocking(fd: int, timeout_s: float) -> None:
    """Limit blocking calls, so that a stopped worker cannot hold the parent in the middle of a message."""
    limit = struct.pack("ll", int(min(timeout_s, LONGEST_BLOCK_S)) + 1, 0)
    with socket.socket(fileno=os.dup(fd)) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
