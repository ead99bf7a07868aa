"""The parent's side of one worker process: start it, send items, read what it answers, end it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from luffy.rewards.worker import Answer, Setup, unpacked

# Generous, because an importing worker may share a busy machine with a training run.
START_TIMEOUT_S = 180.0
READ_BYTES = 1 << 16
LONGEST_BLOCK_S = 1 << 31

# One thread each: the pool is the parallelism. Plain Python integers: with gmpy2 beside it, sympy
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

Item = tuple[int, tuple[Any, ...]]  # its number, and what the function is called with


class WorkerProcess:
    """One process and the parent's ends of its two channels."""

    def __init__(self, setup: Setup, timeout_s: float) -> None:
        self.ready = False
        self.items: deque[Item] = deque()  # sent, not answered
        self.size, self.sent = 0, 0.0  # of the last message: how many items, and when
        self.has_read = False  # that message
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
        return self.ready and not self.items

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, items: list[Item], message: bytes, timeout_s: float) -> None:
        self.items.extend(items)
        self.size, self.has_read = len(items), False
        self.connection.send_bytes(message)
        self.sent = time.monotonic()
        self.deadline = self.sent + timeout_s

    def answers(self) -> list[Answer]:
        """Those that have arrived whole, in order; "crashed" when the process is gone. Quick items end faster than one
        call an answer would take."""
        try:
            arrived = os.read(self.connection.fileno(), READ_BYTES)
        except OSError:
            arrived = b""
        if not arrived:
            return [("crashed", None, f"worker died with {self.exit_reason()}")]
        answers, self._unread = unpacked(self._unread + arrived)
        return answers

    def exit_reason(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its connection closed"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def kill_process(self) -> None:
        """End the process and whatever it started (it leads its own process group), also when it ended by itself."""
        if not self._ended:
            self._ended = True
            with suppress(ProcessLookupError, PermissionError):  # nobody is left; on macOS a zombie is
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def release(self) -> None:
        self.kill_process()
        if not self.connection.closed:
            self.connection.close()
            os.close(self._lifeline)


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
    """With stdin closed, a new descriptor may get number 0, which the child's own stdin would overwrite."""
    if fd > 2:
        return fd
    moved: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _bound_blocking(fd: int, timeout_s: float) -> None:
    """A stopped worker must not block the parent in the middle of a message."""
    limit = struct.pack("ll", int(min(timeout_s, LONGEST_BLOCK_S)) + 1, 0)
    with socket.socket(fileno=os.dup(fd)) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
