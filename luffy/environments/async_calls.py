"""Calls of ``async`` methods: those of one object share one event loop, in whatever thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


class AsyncCalls:
    """Calls the methods of one object. Its loop begins with the first ``async`` one and runs during such calls only."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The result of a call, awaited where it has to be."""
        result = function(*args, **named)
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if self._loop.is_running():  # a call that was given up: this one runs beside it
            return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()
        loop = self._loop
        try:
            return loop.run_until_complete(_awaited(result))
        finally:
            if self._loop is not loop:  # closed while this call was hanging
                loop.close()

    def close_with(self, thing: Any) -> None:
        """Call ``thing.close``, if there is one, and end the loop."""
        try:
            if hasattr(thing, "close"):
                self.call(thing.close)
        finally:
            self.close()

    def close(self) -> None:
        """Cancel all that still runs in the loop, and end it."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        if loop.is_running():
            with suppress(RuntimeError):  # it ended meanwhile
                loop.call_soon_threadsafe(_cancel_all, loop)
            return
        _cancel_all(loop)
        with suppress(Exception):
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class SharedLoop:
    """An event loop in a thread of its own, for objects that share connections or locks. One call that
    blocks stops all."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="environment-loop", daemon=True).start()

    def call(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        """The result of an ``async`` function."""
        return asyncio.run_coroutine_threadsafe(function(*args), self._loop).result()


async def _awaited(result: Any) -> Any:
    return await result


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
