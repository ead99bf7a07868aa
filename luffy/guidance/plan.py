"""The plan of a step: its episodes, with what a teacher already wrote and what the engine has to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import torch
from torch import Tensor

from luffy.guidance.ratios import RatioSchedule
from luffy.guidance.trace_choice import ORDERS, choose
from luffy.seeds import seed_of
from luffy.types import Author, Completion, Demonstration, Episode, Sampling, Task, is_drawn, written_by


@dataclass(frozen=True)
class Planner:
    """Plans ``n`` samples a task, ``n_prefix`` of which start from a trace where the task has one. ``ends_prefix(id)``
    says behind which tokens a part of a trace may end (None: behind any)."""

    n: int
    n_prefix: int
    sampling: Sampling
    schedule: RatioSchedule
    trace_choice: str
    seed: int
    ends_prefix: Callable[[int], bool] | None = None

    def prefix_length(self, demonstration: Demonstration, ratio: float) -> int:
        """Tokens of this share of a trace. A part ends behind the last token of it that may end a prefix (0 tokens if
        there is none), of several turns behind a whole one; the whole trace is left as it is."""
        ids = demonstration.token_ids
        length = int(ratio * len(ids))
        if demonstration.replies:
            return whole_turns(demonstration, length)
        if self.ends_prefix is not None and length < len(ids):
            while length and not self.ends_prefix(ids[length - 1]):
                length -= 1
        return length

    def key(self, step: int, position: int, task: Task) -> str:
        """Names a task in a step of this run: the seed of whatever is drawn for it."""
        return f"{self.seed}:{step}:{position}:{task.problem.id}"

    def plan(
        self,
        tasks: Sequence[Task],
        step: int,
        visits: Sequence[int],
        trace_rewards: Callable[[Task], Sequence[float]] | None = None,
        positions: Sequence[int] | None = None,
    ) -> list[tuple[Episode, ...]]:
        """``group`` of each task; ``positions``: by default from 0 on."""
        places = range(len(tasks)) if positions is None else positions
        return [
            self.group(task, step, visit, place, trace_rewards)
            for task, visit, place in zip(tasks, visits, places, strict=True)
        ]

    def group(
        self,
        task: Task,
        step: int,
        visit: int,
        position: int,
        trace_rewards: Callable[[Task], Sequence[float]] | None = None,
    ) -> tuple[Episode, ...]:
        """``n`` episodes of a task: traces first, then the policy's own. ``position`` of the task in the step over all
        processes keeps seeds apart if a problem comes twice in one step, and the same on any number of processes."""
        key = self.key(step, position, task)
        guided: list[tuple[Demonstration | None, int]] = []
        if self.n_prefix and task.demonstrations:
            asked = ORDERS.known(self.trace_choice).needs_rewards
            rewards = trace_rewards(task) if asked and trace_rewards else None
            choice = self.trace_choice
            chosen = choose(task.demonstrations, self.n_prefix, choice, visit=visit, key=key, rewards=rewards)
            ratios = self.schedule.ratios(self.n_prefix, step, f"{self.seed}:{task.problem.id}")
            guided = [(trace, self.prefix_length(trace, ratio)) for trace, ratio in zip(chosen, ratios, strict=True)]
        own: list[tuple[Demonstration | None, int]] = [(None, 0)] * (self.n - len(guided))
        return tuple(
            self.planned(task, trace, prefix, seed_of(f"{key}:{j}"))
            for j, (trace, prefix) in enumerate([*guided, *own])
        )

    def planned(self, task: Task, demonstration: Demonstration | None, prefix: int, seed: int) -> Episode:
        """One episode: the first ``prefix`` tokens of a trace, of several turns the whole ones among them, then the
        engine's (none if that is the whole trace)."""
        if demonstration is not None and demonstration.replies:
            prefix = whole_turns(demonstration, prefix)
        if demonstration is None or prefix == 0:
            return unwritten(task, seed, self.sampling)
        begun = given(task, demonstration, prefix)
        if prefix == len(demonstration.token_ids):
            return replace(begun, seed=seed, sampling=self.sampling) if demonstration.replies else begun
        sampling = replace(self.sampling, max_tokens=self.sampling.max_tokens - begun.length)
        return replace(begun, finish=None, seed=seed, sampling=sampling)


def whole_turns(trace: Demonstration, most: int) -> int:
    """Tokens of the teacher's whole turns among the first ``most`` of a trace with replies; the last turn's reply is
    left out, since a live environment gives it."""
    if most >= len(trace.token_ids):
        return len(trace.token_ids)
    return max((start for start, _ in trace.replies if start <= most), default=0)


NO_IDS, NO_AUTHORS, NO_LOG_PROBS = torch.empty(0).long(), torch.empty(0, dtype=torch.int8), torch.empty(0)


def unwritten(task: Task, seed: int, sampling: Sampling) -> Episode:
    """An episode that the engine draws from its first token on."""
    return Episode(task, NO_IDS, NO_AUTHORS, NO_LOG_PROBS, NO_LOG_PROBS, None, seed, sampling)


def given(task: Task, trace: Demonstration, prefix: int | None = None, author: Author = Author.TEACHER) -> Episode:
    """The first ``prefix`` tokens of a trace (None: all of it) as an episode."""
    length = len(trace.token_ids) if prefix is None else prefix
    ids, recorded = torch.tensor(trace.token_ids[:length], dtype=torch.long), trace.log_probs
    behavior = torch.tensor(recorded[:length] if recorded else [0.0] * length, dtype=torch.float32)
    authors = written_by(author, length)
    for start, end in trace.replies:
        authors[start:end] = Author.ENVIRONMENT
    ratio = length / len(trace.token_ids)
    return Episode(task, ids, authors, behavior, torch.zeros(length), "trace", trace=trace, prefix_ratio=ratio)


def without_hint(episode: Episode) -> Episode:
    """An episode that was drawn with a hint, as a response to the prompt without it: its tokens are off-policy, and
    their behaviour is what drew them. ``task.hint`` still says which hint that was."""
    plain = episode.task.plain_ids
    assert plain is not None
    task = replace(episode.task, prompt_ids=plain, hint_text="", plain_ids=None)
    authors = torch.where(is_drawn(episode.authors), Author.REPLAY, episode.authors)
    return replace(episode, task=task, authors=authors, prefix_ratio=1.0)


def appended(
    episode: Episode, token_ids: Tensor, authors: Tensor, log_probs: Tensor, versions: Tensor, **changes: Any
) -> Episode:
    """An episode with further tokens, and the version of the policy that drew each (-1: none did); ``changes`` of its
    other fields."""
    before = episode.token_versions
    if before is None and bool((versions >= 0).any()):
        before = torch.full((episode.token_ids.numel(),), -1)
    return replace(
        episode,
        token_ids=torch.cat([episode.token_ids, token_ids]),
        authors=torch.cat([episode.authors, authors]),
        behavior_log_probs=torch.cat([episode.behavior_log_probs, log_probs]),
        engine_log_probs=torch.cat([episode.engine_log_probs, log_probs]),
        token_versions=None if before is None else torch.cat([before, versions]),
        **changes,
    )


def with_reply(episode: Episode, token_ids: Tensor) -> Episode:
    """An episode that goes on behind what its environment answered."""
    count = token_ids.numel()
    authors, versions = written_by(Author.ENVIRONMENT, count), torch.full((count,), -1)
    return appended(episode, token_ids, authors, torch.zeros(count), versions, finish=None)


def as_planned(episode: Episode) -> Episode:
    """The episode before the engine drew any of it: the tokens of its trace alone."""
    trace = episode.trace
    given = 0 if trace is None else round(episode.prefix_ratio * len(trace.token_ids))
    names = ("token_ids", "authors", "behavior_log_probs", "engine_log_probs")
    begun = {name: getattr(episode, name)[:given] for name in names}
    return replace(episode, **begun, finish=None, policy_version=0, token_versions=None, outcome=None)


def extended(episode: Episode, more: Completion, version: int, in_parts: bool = False) -> Episode:
    """An episode with the tokens that the engine drew, under the policy of that version. ``in_parts``: it was asked for
    a part of the rest, so the episode may go on."""
    before, own = episode.token_ids.numel(), more.log_probs.float().cpu()
    drawn_with, put_in, guided = more.behavior_log_probs, more.overrides, more.guidance_log_probs
    streams = (
        more.token_ids.cpu(),
        written_by(Author.POLICY, own.numel()) if put_in is None else put_in.cpu().to(torch.int8),  # Author.GUIDE
        own if drawn_with is None else drawn_with.float().cpu(),
        own,
    )
    if before:
        begun = episode.token_ids, episode.authors, episode.behavior_log_probs, episode.engine_log_probs
        streams = tuple(map(torch.cat, zip(begun, streams, strict=True)))  # type: ignore[assignment]
    ids, authors, behavior, engine = streams
    ends = not in_parts or more.finish == "stop" or episode.drawn + own.numel() >= _most(episode)
    versions = _versions(episode, more, version) if in_parts or more.versions is not None else None
    return replace(
        episode,
        token_ids=ids,
        authors=authors,
        behavior_log_probs=behavior,
        engine_log_probs=engine,
        finish=more.finish if ends else None,
        policy_version=version if versions is None else int(versions[-1]),
        guidance_log_probs=None if guided is None else torch.cat([torch.full((before,), nan), guided.float().cpu()]),
        token_versions=versions,
    )


def _most(episode: Episode) -> int:
    """Tokens that the engine may draw in all."""
    assert episode.sampling is not None
    return episode.sampling.max_tokens


def _versions(episode: Episode, more: Completion, version: int) -> Tensor:
    """[T] long: of the policies that drew the episode's tokens and those behind them."""
    before, now = episode.token_versions, more.versions
    if before is None:
        before = torch.full((episode.token_ids.numel(),), -1)
    return torch.cat([before, torch.full((more.token_ids.numel(),), version) if now is None else now])
