"""The responses of an evaluation: what the model sees, and what it answers, with an environment turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Any

from luffy.config import EnvironmentConfig
from luffy.conversations import Conversations, conversations_of, played, tools_of
from luffy.data import Encoder
from luffy.data.prompts import resolve_style
from luffy.evaluation import plan
from luffy.evaluation.engines import LoadedModel
from luffy.evaluation.results import Settings
from luffy.guidance.plan import extended, unwritten
from luffy.types import Episode, Request, Sampling


def encoder_for(
    loaded: LoadedModel,
    style: str,
    system_prompt: str | None,
    environment: EnvironmentConfig | None,
    paper: bool = False,
    **options: Any,
) -> Encoder:
    """An encoder for prompts of any length that the model takes. ``paper``: the automatic style is the paper's."""
    return Encoder(
        loaded.tokenizer,
        resolve_style(style, loaded.tokenizer, paper=paper),
        system_prompt,
        max_prompt_tokens=loaded.context - 1,
        overlong_prompt="drop",
        tools=tools_of(environment),
        **options,
    )


def conversations_for(
    e: EnvironmentConfig | None, encoder: Encoder, max_tokens: int, room: int
) -> Conversations | None:
    """What episodes are played with; behind a prompt there is ``room`` for so many tokens."""
    return conversations_of(e, encoder, min((e and e.max_tokens) or 2 * max_tokens, room))


def begun(jobs: Iterable[plan.PlannedResponse], loaded: LoadedModel, settings: Settings) -> Iterator[Episode]:
    """The episode of each response to make, with nothing in it yet."""

    @cache  # an engine checks requests with the same tokens and sampling once
    def sampling(prompt_length: int) -> Sampling:
        most = min(settings.max_tokens, loaded.context - prompt_length)
        return Sampling(most, settings.temperature, settings.top_p, settings.top_k, loaded.eos_ids)

    for job in jobs:
        yield unwritten(job.task, job.seed(settings.seed), sampling(len(job.task.prompt_ids)))


def finished_in_parts(
    loaded: LoadedModel, episodes: Iterable[Episode], chunk: int, count: Callable[[int], object] = lambda done: None
) -> Iterator[list[tuple[int, Episode]]]:
    """Episodes with their answers, each with its number, in the order in which they finish; ``chunk`` of them at a
    time. Those with an environment are played ``chunk`` at a time. ``count(done)`` hears of each."""
    numbered, under_way = enumerate(episodes), dict[int, Episode]()
    if loaded.conversations is not None:
        while some := list(islice(numbered, chunk)):
            numbers, unplayed = zip(*some, strict=True)
            yield list(zip(numbers, played(loaded.conversations, loaded.engine, unplayed), strict=True))
            count(numbers[-1] + 1)
        return

    def requests() -> Iterator[Request]:
        for number, episode in numbered:
            under_way[number] = episode
            yield episode.request_for()

    part: list[tuple[int, Episode]] = []
    for done, (number, completion) in enumerate(loaded.engine.stream(requests()), start=1):
        part.append((number, extended(under_way.pop(number), completion, 0)))
        count(done)
        if len(part) == chunk:
            yield part
            part = []
    if part:
        yield part
