"""How far a long job is: a bar on a terminal, a plain line now and then in a file or a pipe."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

T = TypeVar("T")
Advance = Callable[[int], None]

LINES_WHEN_PIPED = 20


@contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Advance]:
    """``advance(count)`` after each piece of work; ``done`` is what an earlier run left finished."""
    console = Console(file=lasting(sys.stderr))
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
            say(console, f"{label} {done}/{total} ({100 * done // max(total, 1)}%), {speed:.1f}/s")

    return advance


def say(console: Console, text: str, style: str | None = None) -> None:
    """A plain line: as it is, however long."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


class LastingStream:
    """A text stream whose reader may go away: from then on what is written goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text)) or 0

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except OSError:
            with suppress(
                OSError, ValueError
            ):  # below the stream's buffer, which still holds what could not be written
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting(stream: TextIO | None) -> TextIO:
    """The stream, made to outlive its reader. (``sys.stderr`` is None where it was closed from the start.)"""
    return cast(TextIO, LastingStream(stream if stream is not None else open(os.devnull, "w")))
