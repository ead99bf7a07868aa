"""Code of a worker process: load one function, then answer one item after another.

The parent kills the process when an item takes too long, so nothing here needs to be interruptible.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from luffy.errors import UserError
from luffy.plugins import NAMED
from luffy.registry import resolve


@dataclass(frozen=True)
class Setup:
    """How to load the function: ``function_path``, or with ``factory_args`` the function it returns."""

    function_path: str
    factory_args: tuple[Any, ...] | None
    memory_bytes: int
    named: dict[str, str]  # folders of modules that the user named


Answer = tuple[str, Any, str]  # status, value, message
_LENGTH = struct.Struct("!Q")


def send(connection: Connection, answer: Answer) -> None:
    """Write an answer at once: it counts even if this process is killed at its next item."""
    packed = pickle.dumps(answer)
    left = memoryview(_LENGTH.pack(len(packed)) + packed)
    while left:
        left = left[os.write(connection.fileno(), left) :]


def unpacked(data: bytes) -> tuple[list[Answer], bytes]:
    """Complete answers in the data, and the bytes after them."""
    answers, start = [], 0
    while start + _LENGTH.size <= len(data):
        first = start + _LENGTH.size
        end = first + _LENGTH.unpack_from(data, start)[0]
        if end > len(data):
            break
        answers.append(pickle.loads(data[first:end]))
        start = end
    return answers, data[start:]


def main(connection_fd: int, lifeline_fd: int) -> None:
    """Entry of the process. ``lifeline_fd`` is a pipe whose other end only the parent holds."""
    for fd in (connection_fd, lifeline_fd):  # in the hands of what the function starts, it would outlive this process
        os.set_inheritable(fd, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a blocked SIGVTALRM would be inherited and disarm soft limits
    die_with_parent(lifeline_fd)
    # Sent to a whole job, it asks the parent to end its step, which needs this process. A handler, because what the
    # function starts would inherit that the signal is ignored.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # A function that prints must not write into a command's standard output.
    sys.stdout = sys.stderr
    with Connection(connection_fd) as connection:
        try:
            setup: Setup = connection.recv()
            function = _load(setup)
        except Exception as error:
            send(connection, ("failed", isinstance(error, UserError), describe(error)))
            return
        limit_memory(setup.memory_bytes)
        send(connection, ("ready", None, ""))
        _serve(connection, function)


def die_with_parent(lifeline_fd: int) -> None:
    """Ask the kernel for SIGIO, which ends this process and what it started (its process group), when the parent's
    end of the pipe closes.

    Unlike a watching thread it also ends a worker that holds the interpreter lock in a long
    big-integer operation; unlike a parent-death signal it does not depend on the spawning thread.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    try:
        os.read(lifeline_fd, 1)
    except BlockingIOError:
        return
    os._exit(0)  # the parent was gone before the kernel was asked


def limit_memory(memory_bytes: int) -> None:
    """Cap the address space at what the imports took plus ``memory_bytes``; no core files either."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    limit = _address_space() + memory_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def describe(error: BaseException) -> str:
    """One line about an error, even one that cannot be printed (a truncated expression, a huge number)."""
    try:
        text = " ".join(str(error).encode("utf-8", "replace").decode("utf-8").split())  # no file takes half a character
    except Exception as again:
        text = f"(unprintable: {type(again).__name__})"
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text}"[:500]


def _load(setup: Setup) -> Callable[..., Any]:
    NAMED.add(setup.named)
    function = resolve(setup.function_path)
    if setup.factory_args is None:
        return function
    return function(*setup.factory_args)  # type: ignore[no-any-return]


def _serve(connection: Connection, function: Callable[..., Any]) -> None:
    while True:
        try:
            message: list[bytes] = connection.recv()
        except EOFError:  # the parent is gone
            os.killpg(os.getpgrp(), signal.SIGKILL)
        for item in message:
            try:
                send(connection, ("ok", function(*pickle.loads(item)), ""))
            except MemoryError:
                # Half-built objects stay in the heap, so this process is not fit for another item.
                send(connection, ("crashed", None, "out of memory"))
                return
            except Exception as error:
                send(connection, ("error", None, describe(error)))


def _address_space() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[0]) * resource.getpagesize()
