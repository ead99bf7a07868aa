"""How likely the policy finds the gold answer after each trace of a problem: what AMPO ranks traces by."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from luffy.models.load import decode
from luffy.step.draws import trace_sample
from luffy.step.run_state import Run
from luffy.types import Demonstration, Task

Text = Callable[[Sequence[int]], str]


def answer_probs(run: Run, tasks: Sequence[Task]) -> list[tuple[float, ...]]:
    """One number for each trace of each task: the mean probability that the policy gives the tokens of the gold answer.
    One pass over all traces; every rank must take part, be it without a task."""
    spans = [
        (task, *answer_place(run, trace.token_ids, task.problem.answer))
        for task in tasks
        for trace in task.demonstrations
    ]
    log_probs = run.policy.log_probs([trace_sample(task, Demonstration(ids)) for task, ids, _ in spans])
    probs = iter([float(values[start:].exp().mean()) for values, (_, _, start) in zip(log_probs, spans, strict=True)])
    return [tuple(next(probs) for _ in task.demonstrations) for task in tasks]


def answer_place(run: Run, ids: tuple[int, ...], answer: str) -> tuple[tuple[int, ...], int]:
    """The trace up to the end of the last place where it writes the answer, and where the answer's tokens begin. A
    trace that does not write it gets it in place of its end token."""
    text_of: Text = lambda part: decode(run.tokenizer, [list(part)])[0]  # noqa: E731
    place = last_place(ids, answer.strip(), text_of)
    if place is not None:
        start, end = place
        return ids[:end], start
    body = ids[:-1] if ids[-1] in run.eos_ids else ids
    return (*body, *run.tokenizer(answer, add_special_tokens=False)["input_ids"]), len(body)


def last_place(ids: Sequence[int], words: str, text_of: Text) -> tuple[int, int] | None:
    """The shortest range of tokens that holds the last occurrence of some words; None where there is none."""
    if not words or words not in text_of(ids):
        return None
    # The text from a token on holds the words up to some token and not beyond it; so does the text up to a token.
    start = bisect_left(range(len(ids)), True, key=lambda i: words not in text_of(ids[i + 1 :]))
    end = bisect_left(range(start, len(ids)), True, key=lambda i: words in text_of(ids[start : i + 1]))
    return start, start + end + 1
