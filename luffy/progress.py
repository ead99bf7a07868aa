"""How far a long job is: a bar on a terminal, a plain line now and then in a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

Advance = Callable[[int], None]

LINES_WHEN_PIPED = 20


@contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Advance]:
    """``advance(count)`` after each piece of work; ``done`` is what an earlier run left finished."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_printer(console, label, total, done)
        return
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bar:
        task = bar.add_task(label, total=total, completed=done)
        yield lambda count: bar.update(task, advance=count)


def _line_printer(console: Console, label: str, total: int, done: int) -> Advance:
    started, first, shown = time.monotonic(), done, done * LINES_WHEN_PIPED // max(total, 1)

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        reached = done * LINES_WHEN_PIPED // max(total, 1)
        if reached > shown or done == total:
            shown = reached
            speed = (done - first) / max(time.monotonic() - started, 1e-9)
            line = f"{label} {done}/{total} ({100 * done // max(total, 1)}%), {speed:.1f}/s"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return advance
