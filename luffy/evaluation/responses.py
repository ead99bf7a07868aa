"""The responses of an evaluation: what the model sees, and what it answers, with an environment turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from luffy.config import EnvironmentConfig
from luffy.conversations import Conversations, conversations_of, played, tools_of
from luffy.data import Encoder
from luffy.data.prompts import resolve_style
from luffy.evaluation import plan
from luffy.evaluation.engines import LoadedModel
from luffy.evaluation.results import Settings
from luffy.evaluation.scoring import Response
from luffy.guidance.plan import extended, unwritten
from luffy.run_folder.console import EvalView
from luffy.types import Episode, Sampling


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


def answered(loaded: LoadedModel, begun: Sequence[Episode]) -> list[Episode]:
    """The episodes, each with its answer, or played to its end."""
    if loaded.conversations is not None:
        return played(loaded.conversations, loaded.engine, begun)
    completions = loaded.engine.generate([episode.request_for() for episode in begun])
    return [extended(episode, completion, 0) for episode, completion in zip(begun, completions, strict=True)]


def finished_in_parts(
    jobs: Sequence[plan.PlannedResponse],
    loaded: LoadedModel,
    settings: Settings,
    chunk: int,
    view: EvalView,
) -> Iterator[list[Response]]:
    """Responses in the order in which they finish; ``chunk`` of them at a time. Those with an environment are played
    ``chunk`` at a time."""

    @cache  # an engine checks requests with the same tokens and sampling once
    def sampling(prompt_length: int) -> Sampling:
        most = min(settings.max_tokens, loaded.context - prompt_length)
        return Sampling(most, settings.temperature, settings.top_p, settings.top_k, loaded.eos_ids)

    def begun(job: plan.PlannedResponse) -> Episode:
        return unwritten(job.task, job.seed(settings.seed), sampling(len(job.task.prompt_ids)))

    if loaded.conversations is not None:
        for start in range(0, len(jobs), chunk):
            some = jobs[start : start + chunk]
            yield list(zip(some, answered(loaded, list(map(begun, some))), strict=True))
            view.working(start + len(some))
        return
    requests = (begun(job).request_for() for job in jobs)
    part: list[Response] = []
    for count, (index, completion) in enumerate(loaded.engine.stream(requests), start=1):
        part.append((jobs[index], extended(begun(jobs[index]), completion, 0)))
        view.working(count)
        if len(part) == chunk or count == len(jobs):
            yield part
            part = []
