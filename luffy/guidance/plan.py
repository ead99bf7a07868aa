"""The plan of a step: what the engine has to generate and what a teacher already wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from luffy.guidance.ratios import RatioSchedule
from luffy.guidance.trace_choice import TraceChoice, choose
from luffy.seeds import seed_of
from luffy.types import Completion, Demonstration, Finish, Request, Rollout, Sampling, Task


@dataclass(frozen=True)
class Planned:
    """One sample to come: ``prefix`` teacher tokens, then the engine's (none when the trace is whole)."""

    task: Task
    request: Request | None
    demonstration: Demonstration | None = None
    prefix: int = 0

    @property
    def prefix_ratio(self) -> float:
        return self.prefix / len(self.demonstration.token_ids) if self.demonstration else 0.0


@dataclass(frozen=True)
class Plan:
    """Planned samples per task, ``n`` each; traces first, then the policy's own."""

    groups: tuple[tuple[Planned, ...], ...]

    @property
    def requests(self) -> list[Request]:
        return [p.request for group in self.groups for p in group if p.request is not None]

    def assemble(self, completions: Sequence[Completion], version: int) -> list[tuple[Rollout, ...]]:
        """Completions, in the order of ``requests``, joined with their prefixes and the whole traces."""
        done = iter(completions)
        return [
            tuple(rollout_of(p, None if p.request is None else next(done), version) for p in group)
            for group in self.groups
        ]


@dataclass(frozen=True)
class Planner:
    """Plans ``n`` samples a task, ``n_prefix`` of which start from a trace where the task has one. ``ends_prefix(id)``
    says behind which tokens a part of a trace may end (None: behind any)."""

    n: int
    n_prefix: int
    sampling: Sampling
    schedule: RatioSchedule
    trace_choice: TraceChoice
    seed: int
    ends_prefix: Callable[[int], bool] | None = None

    def prefix_length(self, demonstration: Demonstration, ratio: float) -> int:
        """Tokens of this share of a trace. A part ends behind the last token of it that may end a prefix (0 tokens if
        there is none); the whole trace is left as it is."""
        ids = demonstration.token_ids
        length = int(ratio * len(ids))
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
    ) -> Plan:
        """``positions`` are the places of these tasks in the step's global batch (default: from 0 on). They keep
        seeds apart when the same problem comes twice in one step, and the same on any number of processes."""
        places = range(len(tasks)) if positions is None else positions
        return Plan(
            tuple(
                self._group(task, step, visit, place, trace_rewards)
                for task, visit, place in zip(tasks, visits, places, strict=True)
            )
        )

    def _group(
        self,
        task: Task,
        step: int,
        visit: int,
        position: int,
        trace_rewards: Callable[[Task], Sequence[float]] | None,
    ) -> tuple[Planned, ...]:
        key = self.key(step, position, task)
        guided: list[tuple[Demonstration | None, int]] = []
        if self.n_prefix and task.demonstrations:
            rewards = trace_rewards(task) if self.trace_choice == "best_reward" and trace_rewards else None
            choice = self.trace_choice
            chosen = choose(task.demonstrations, self.n_prefix, choice, visit=visit, key=key, rewards=rewards)
            ratios = self.schedule.ratios(self.n_prefix, step, f"{self.seed}:{task.problem.id}")
            guided = [(trace, self.prefix_length(trace, ratio)) for trace, ratio in zip(chosen, ratios, strict=True)]
        own = [(None, 0)] * (self.n - len(guided))
        return tuple(
            self.planned(task, trace, prefix, seed_of(f"{key}:{j}"))
            for j, (trace, prefix) in enumerate([*guided, *own])
        )

    def planned(self, task: Task, demonstration: Demonstration | None, prefix: int, seed: int) -> Planned:
        """One sample: the first ``prefix`` tokens of a trace, the rest by the engine (nothing if that is all of it)."""
        if demonstration is None or prefix == 0:
            return Planned(task, Request(task.prompt_ids, seed, self.sampling))
        if prefix == len(demonstration.token_ids):
            return Planned(task, None, demonstration, prefix)
        sampling = replace(self.sampling, max_tokens=self.sampling.max_tokens - prefix)
        request = Request(task.prompt_ids, seed, sampling, demonstration.token_ids[:prefix])
        return Planned(task, request, demonstration, prefix)


def rollout_of(planned: Planned, completion: Completion | None, version: int) -> Rollout:
    """A planned sample with what the engine made of it: nothing, where the trace is whole."""
    prefix, guided, versions = planned.prefix, None, None
    if completion is None:
        streams, finish = _given(planned), cast(Finish, "trace")
    else:
        streams, finish = _made(completion), completion.finish
        if prefix:
            streams = _Streams(*map(torch.cat, zip(_given(planned), streams, strict=True)))
        if completion.versions is not None:
            versions = torch.cat([torch.full((prefix,), -1), completion.versions])
            version = int(versions[-1])
        if completion.guidance_log_probs is not None:
            unknown = torch.full((prefix,), torch.nan)
            guided = torch.cat([unknown, completion.guidance_log_probs.float().cpu()])
    return Rollout(
        task=planned.task,
        token_ids=streams.token_ids,
        prefix=prefix,
        behavior_log_probs=streams.behavior,
        engine_log_probs=streams.engine,
        overrides=streams.overrides,
        finish=finish,
        prefix_ratio=planned.prefix_ratio,
        policy_version=version,
        guidance_log_probs=guided,
        token_versions=versions,
    )


class _Streams(NamedTuple):
    """Of a `Rollout` or a part of it."""

    token_ids: Tensor
    behavior: Tensor
    engine: Tensor
    overrides: Tensor


def _given(planned: Planned) -> _Streams:
    """What the teacher wrote."""
    demonstration, prefix = planned.demonstration, planned.prefix
    assert demonstration is not None
    ids, recorded = torch.tensor(demonstration.token_ids[:prefix], dtype=torch.long), demonstration.log_probs
    behavior = torch.tensor(recorded[:prefix] if recorded else [0.0] * prefix, dtype=torch.float32)
    return _Streams(ids, behavior, torch.zeros(prefix), torch.zeros(prefix, dtype=torch.bool))


def _made(completion: Completion) -> _Streams:
    """What the engine made."""
    own, drawn_with, put_in = completion.log_probs.float().cpu(), completion.behavior_log_probs, completion.overrides
    return _Streams(
        completion.token_ids.cpu(),
        own if drawn_with is None else drawn_with.float().cpu(),
        own,
        torch.zeros(own.numel(), dtype=torch.bool) if put_in is None else put_in.cpu(),
    )
