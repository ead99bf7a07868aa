"""Calls of ``async`` methods share a loop, and a loop that is closed leaves nothing behind."""

import asyncio
import threading
from contextlib import suppress

import pytest

from luffy.environments.async_calls import AsyncCalls

LONG = 30.0


async def loop_of():
    return asyncio.get_running_loop()


def test_what_runs_in_the_background_ends_with_the_loop():
    calls, ended, kept = AsyncCalls(), [], []

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def numbers():
        try:
            yield 1
        finally:
            ended.append("generator")

    async def begin():
        kept.extend((asyncio.create_task(forever()), numbers()))
        return await anext(kept[1])

    assert calls.call(begin) == 1
    loop = calls.call(loop_of)
    calls.close()
    assert ended == ["task", "generator"] and loop.is_closed()
    calls.close()


def test_a_close_that_raises_ends_the_loop_too():
    class Failing:
        async def close(self):
            raise ValueError("not now")

    calls = AsyncCalls()
    loop = calls.call(loop_of)
    with pytest.raises(ValueError, match="not now"):
        calls.close_with(Failing())
    assert loop.is_closed()


def test_others_run_beside_a_call_that_hangs_until_it_is_cancelled():
    calls, began = AsyncCalls(), threading.Event()

    async def hang():
        began.set()
        await asyncio.Event().wait()

    def work():
        with suppress(asyncio.CancelledError):
            calls.call(hang)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert began.wait(LONG)
    loop = calls.call(loop_of)
    calls.close()
    thread.join(LONG)
    assert not thread.is_alive() and loop.is_closed()
