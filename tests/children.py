"""Work done in fresh interpreters. Nothing is forked: a process that has used torch cannot be (OpenMP hangs in the copy).

A ``Child`` takes jobs one after the other: a function that can be pickled by its name, and its arguments. It has the
test's import path, folder and environment. It ends with the test's process however that ends, and a job that takes
longer than ``LIMIT_S`` ends it with a stack of every thread.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

LIMIT_S = 240.0  # less than pytest's own limit


class ChildFailed(AssertionError):
    """A job raised: its traceback; or the child ended before the job did: the exit code."""


class Child:
    """A fresh interpreter that has imported a module (the trainer unless told) and waits for jobs."""

    def __init__(self, imported: str = "luffy.train.loop") -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.connection = Connection(ours.detach())
        self.connection.send((sys.path, imported))

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self.connection.send((LIMIT_S, list(sys.path), os.getcwd(), dict(os.environ)))
        self.connection.send_bytes(pickle.dumps((function, args)))

    def result(self) -> Any:
        """What the job returned. Waits for it; raises ``ChildFailed`` when it raised or the child died."""
        try:
            ok, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise ChildFailed(f"the child ended with exit code {self.process.wait()}") from None
        if not ok:
            raise ChildFailed(value)
        return value

    def exit_code(self) -> int:
        """Wait for the job and end the child. 0: the job returned, 1: it raised, -n: the child was ended by signal n."""
        try:
            self.result()
            return 0
        except ChildFailed as failure:
            print(failure, file=sys.stderr)
            return 1 if self.process.poll() is None else self.process.returncode
        finally:
            self.end()

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


_standing: list[Child] = []  # they end when this process does


def in_children(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """``function(*args)`` for every ``args``, each in a child of its own, at the same time; what they returned.

    The children stay for the next call, because importing torch takes seconds; the n-th ``args`` always go to the
    n-th child, because torch caches what belongs to a rank. So the function must leave its interpreter as it found
    it. When one job fails, all of them end, and the next call has new children.
    """
    while len(_standing) < len(arguments):
        _standing.append(Child())
    children = _standing[: len(arguments)]
    try:
        for child, args in zip(children, arguments, strict=True):
            child.start(function, *args)
        results, waiting = {}, dict(enumerate(children))
        while waiting:  # in the order they end: those that wait for one that failed need not be waited for
            ready = wait([child.connection for child in waiting.values()])
            for number in [n for n, child in waiting.items() if child.connection in ready]:
                results[number] = waiting.pop(number).result()
        return [results[number] for number in range(len(children))]
    except BaseException:
        end_children()
        raise


def end_children() -> None:
    """The next call has new children."""
    while _standing:
        _standing.pop().end()


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns in a child that is used again."""
    return in_children(function, [args])[0]


def exit_code_in_child(function: Callable[..., Any], *args: Any) -> int:
    """For a function that kills or changes its interpreter: the child is not used again."""
    child = _standing.pop() if _standing else Child()
    child.start(function, *args)
    return child.exit_code()


def _serve(connection: Connection) -> None:
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                jobs.put((connection.recv(), connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)  # the test's process is gone, or needs this one no more

    sys.path[:], imported = connection.recv()
    importlib.import_module(imported)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    threading.Thread(target=listen, daemon=True).start()
    while True:
        (limit_s, *place), job = jobs.get()
        faulthandler.dump_traceback_later(limit_s, exit=True)
        connection.send_bytes(_answer(*place, job))
        faulthandler.cancel_dump_traceback_later()


def _answer(path: list[str], folder: str, environment: dict[str, str], job: bytes) -> bytes:
    try:
        sys.path[:] = path  # before the function is looked up
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        function, args = pickle.loads(job)
        return pickle.dumps((True, function(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
