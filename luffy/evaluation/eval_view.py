"""Progress of an evaluation: a bar on a terminal, a line per save in a file or a pipe."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from luffy.progress import lasting
from luffy.run_folder.console import clock


class EvalView:
    """``working`` counts responses of this run that are finished, ``saved`` adds those that are scored and on the disk,
    from another thread."""

    def __init__(self, name: str, total: int, done: int) -> None:
        self.console = Console(file=lasting(sys.stderr))
        self.total, self.first, self.done = total, done, done
        self.tokens = 0
        self.started = time.monotonic()
        self._bar: Progress | None = None
        if done:
            self.say(f"{done} of {total} responses were already there; resuming with the rest")
        if self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task(name, total=total, completed=done, figures="")
            self._bar.start()

    def working(self, finished: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.first + finished)

    def saved(self, responses: int, tokens: int, right: int, where: str) -> None:
        self.done += responses
        self.tokens += tokens
        spent = max(time.monotonic() - self.started, 1e-9)
        figures = f"{where}  right {right}/{responses}  {self.tokens / spent:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, figures=figures)
            return
        eta = spent / max(self.done - self.first, 1) * (self.total - self.done)
        self.say(f"{self.done}/{self.total} responses ({100 * self.done // self.total}%)  {figures}  eta {clock(eta)}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
