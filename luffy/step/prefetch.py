"""Prefetched rollouts: a thread generates the batches of coming steps while the update of this one runs.

    update     |  step 0  |  step 1  |  step 2  |
    rollout  0 |     1    |     2    |     3    |        max_staleness 1: batch 2 is of version 1

A batch begins with the newest weights there are, and only when they are at most ``max_staleness`` versions behind
the step that will use it. The thread talks to no process but those it shares an engine with (in a group of their
own): whatever all processes must agree on happens when the batch is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


Make = Callable[[int, int, Callable[[], None]], T]


class PrefetchCancelled(Exception):
    """The prefetcher was closed before the batch was made."""


class Prefetcher(Generic[T]):
    """Makes the batches of coming steps in a thread of its own.

    ``copy_weights`` takes over the published weights; it is called before each batch. ``device``: the GPU that the
    thread works on. Requires ``max_staleness`` > 0.
    """

    def __init__(
        self,
        copy_weights: Callable[[], None],
        max_staleness: int,
        total_steps: int,
        device: torch.device | None = None,
    ) -> None:
        assert max_staleness > 0, "without staleness there is nothing to prefetch"
        self._copy_weights = copy_weights
        self._max_staleness, self._total_steps = max_staleness, total_steps
        self._device = device
        self._changed = threading.Condition()
        self._version = 0
        self._begun = -1
        self._ready: dict[int, T] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """Hold back copies of the published weights while they change to ``version``."""
        with self._changed:
            yield
            self._version = version
            self._changed.notify_all()

    def take(self, step: int, make: Make[T]) -> T:
        """The batch of ``step``. ``make(step, version, check)`` rolls one out; it calls ``check`` from time to time,
        which raises when nobody waits any more. The first call starts the thread, and its ``make`` stays. Returns only
        when the next batch has its weights, so that with a staleness of 1 which version makes a batch never depends on
        who is faster."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(step, make), name="rollouts", daemon=True)
            self._thread.start()
        with self._changed:
            self._wait(lambda: step in self._ready)
            batch = self._ready.pop(step)
            self._wait(lambda: self._begun > step or step + 1 >= self._total_steps)
        return batch

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _wait(self, there: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._closed or self._failure is not None or there())
        if not there():
            raise self._failure or PrefetchCancelled

    def _run(self, first: int, make: Make[T]) -> None:
        try:
            with own_stream(self._device):
                for step in range(first, self._total_steps):
                    version = self._begin(step)
                    batch = make(step, version, self._check)
                    with self._changed:
                        self._ready[step] = batch
                        self._changed.notify_all()
        except PrefetchCancelled:
            pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _begin(self, step: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step - self._version <= self._max_staleness)
            self._check()
            self._copy_weights()
            self._begun = step
            self._changed.notify_all()
            return self._version

    def _check(self) -> None:
        if self._closed:
            raise PrefetchCancelled


def own_stream(device: torch.device | None) -> AbstractContextManager[object]:
    """On a GPU the thread's work must not queue behind the update's. Which GPU is the current one belongs to the
    thread, and a new thread begins with the first."""
    if device is None or device.type != "cuda":
        return nullcontext()
    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream(device))
