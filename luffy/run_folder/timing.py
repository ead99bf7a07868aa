"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """``with watch("rollout"): ...`` adds up; ``take`` reads and clears. On a GPU a phase ends when its work does.
    A phase inside another counts for itself alone, so that those of one thread add up to no more than the step."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.on_phase = on_phase
        self._open: list[str] = []
        self._inner = 0.0  # seconds of phases that ended inside the one under way

    @contextmanager
    def __call__(self, phase: str, on_host: bool = False) -> Iterator[None]:
        """Work ``on_host`` alone leaves nothing on the GPU to wait for."""
        self._open.append(phase)
        self._announce()
        started, before, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            if torch.cuda.is_available() and not on_host:
                # Of this thread alone: rollouts made ahead are none of its work, and while they capture a graph CUDA
                # allows no one to wait for the whole device.
                torch.cuda.current_stream().synchronize()
            spent = time.perf_counter() - started
            self.seconds[phase] += spent - self._inner
            self._inner = before + spent
            self._open.pop()
            self._announce()

    def _announce(self) -> None:
        if self.on_phase is not None and self._open:
            self.on_phase(self._open[-1])

    def take(self) -> dict[str, float]:
        taken = {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken
