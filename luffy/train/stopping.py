"""A run that is asked to stop: by a signal, or by whoever holds the trainer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from luffy.distributed.world import World
from luffy.errors import Interrupted, StopRequested
from luffy.train.held_out import EvaluationInterrupted

CTRL_C = "Ctrl-C"


@dataclass
class StopRequest:
    """``reason`` is None until somebody asks the run to end after the step under way."""

    world: World
    reason: str | None = None

    def error(self, step: int) -> StopRequested:
        kind = Interrupted if self.reason == CTRL_C else StopRequested
        return kind(f"stopped at step {step} by {self.reason}; the same command goes on there")

    def interrupt_evaluation(self) -> None:
        """Raises EvaluationInterrupted after a request. Of several processes none may leave the others alone in an
        evaluation."""
        if self.reason is not None and not self.world.joined:
            raise EvaluationInterrupted

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """SIGTERM, which schedulers send before they kill, and Ctrl-C are requests; a second Ctrl-C ends the run at
        once. Several processes do not see a signal at the same step, so there it ends them at once, and the last
        checkpoint counts."""
        if self.world.joined or threading.current_thread() is not threading.main_thread():
            yield
            return

        def terminated(*_: object) -> None:
            self.reason = "SIGTERM"

        def interrupted(*_: object) -> None:
            self.reason = CTRL_C
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(OSError):  # nobody reads it any more
                os.write(2, b"\nends after this step; Ctrl-C again ends it at once\n")  # print is not safe in a handler

        before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, terminated),
            signal.SIGINT: signal.signal(signal.SIGINT, interrupted),
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
