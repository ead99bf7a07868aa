"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """``with watch("rollout"): ...`` adds up; ``take`` reads and clears. On a GPU a phase ends when its work does."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.on_phase = on_phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self.on_phase is not None:
            self.on_phase(phase)
        started = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds[phase] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        taken = {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken
