"""Rewards in every form that a user may bring; the tests import them inside workers by name."""

import asyncio
import time


def trl(prompts, completions, completion_ids=None, **kwargs):
    """As TRL's documentation writes them: text or messages, columns by name, None where it does not apply."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    if "raise" in texts:
        raise KeyError("no such thing")
    if "hang" in texts:
        time.sleep(1000)
    if "short" in texts:
        return [0.0]
    values = {"none": None, "nan": float("nan"), "huge": 10**400, "text": "1.0"}
    return [values.get(t, float(t == a)) for t, a in zip(texts, kwargs["answer"], strict=True)]


async def trl_async(completions, bonus, **kwargs):
    await asyncio.sleep(0)
    return [len(c) + (b or 0) for c, b in zip(completions, bonus, strict=True)]


def seen(prompts, completions, completion_ids, solution, id):
    """Without **kwargs: it gets what it names, and says what that was."""
    assert prompts == [[{"role": "user", "content": "2+3?"}], "2+3?"], prompts
    assert completions == [[{"role": "assistant", "content": "5"}], "6"], completions
    assert completion_ids == [[7, 8], [9]] and solution == ["five", None] and id == ["a", "b"]
    return [1, 0]


def lengths(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]


class Called:
    def __call__(self, completions, **kwargs):
        return [float(len(completions))] * len(completions)


called = Called()

waiting = 0


async def together(response, answer, problem):
    """The number of samples that were under way with this one."""
    global waiting
    waiting += 1
    if response == "hang":
        await asyncio.sleep(1000)
    if response == "block":
        time.sleep(1000)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "own limit":
        raise TimeoutError("the user's client gave up")
    await asyncio.sleep(0.05)
    return None if response == "none" else waiting


def needs_a_column(completions, missing_one, **kwargs):
    return [0.0] * len(completions)


def ambiguous(response, completions):
    return 0.0


def anything(**kwargs):
    return 0.0


def even_length(completions, answer, **kwargs):
    """For a training: as `length_parity`, for a whole batch."""
    assert len(completions) == len(answer)
    return [float(len(text) % 2) for text in completions]
