"""What the steps of a run work on, as one value: train/build.py makes it, the step (training_step.py) takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from luffy.config import Config, Method
from luffy.conversations import Conversations
from luffy.data import ProblemSampler
from luffy.distributed.replica import Replica
from luffy.distributed.world import World
from luffy.guidance import Gate, Planner
from luffy.learn.policy import Policy
from luffy.learn.scorer import TokenScorer
from luffy.learn.teacher import Teacher
from luffy.rewards import Verifier
from luffy.rollout.engine import Engine
from luffy.run_folder.console import RunView
from luffy.run_folder.saved_state import Progress
from luffy.run_folder.stages import Span
from luffy.run_folder.timing import Stopwatch
from luffy.seeds import seed_of
from luffy.step.batch import StepBatch
from luffy.step.groups import trace_scores
from luffy.step.memory import MethodMemory
from luffy.step.prefetch import Prefetcher
from luffy.step.tasks import TaskSet
from luffy.types import Task

Stages = Iterator[Literal["gated", "rejected", "credited"]]  # of a step: where it pauses (training_step.py)
Begun = tuple[StepBatch, Stages]


@dataclass
class Messages:
    """Messages for the user; warnings wait in ``notices`` until there is a view to show them."""

    facts: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    view: RunView | None = None

    def warn(self, text: str) -> None:
        if self.view is None:
            self.notices.append(text)
        else:
            self.view.warn(text)

    def count(self, done: int, total: int) -> None:
        """Show how far the current phase is."""
        if self.view is not None:
            self.view.count(done, total)


class Engines(Protocol):
    """The engines of a run (train/build_engines.py). ``current`` has the policy's newest weights."""

    current: Engine
    replica: Replica | None

    def renew(self, model: Any) -> None:
        """Give the replica the policy's weights."""


@dataclass
class Run:
    """One process's part of a run. In a ``world`` of several all processes go through the same steps, each with its
    share of the problems; rank 0 alone writes the run folder and speaks to the user."""

    cfg: Config
    method: Method
    world: World
    messages: Messages
    watch: Stopwatch

    tokenizer: Any
    eos_ids: tuple[int, ...]
    tasks: TaskSet
    total_steps: int

    model: Any
    policy: Policy
    reference: TokenScorer | None
    teacher: Teacher | None
    engines: Engines
    engine: Engine  # makes the rollouts; `engines.current` always has the newest weights
    before_step: Callable[[int], None]  # moves the schedule of token overrides
    prefetcher: Prefetcher[Begun] | None  # with async.max_staleness
    verifier: Verifier | None  # none in SFT without held-out problems
    sampler: ProblemSampler
    planner: Planner
    gate: Gate | None
    memory: MethodMemory
    conversations: Conversations | None = None  # what episodes with an environment are played with

    progress: Progress = field(default_factory=Progress)
    span: Span | None = None  # in a run with stages: which one, and where it lies
    ended_at: int | None = None  # step at which the stage ends, if before ``total_steps``
    data_position: dict[str, int] = field(default_factory=dict)  # the sampler's state where the next step begins
    has_judged_reward: bool = False  # whether the scores of this process's first step were compared with reward.success
    _trace_rewards: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data_position = self.sampler.state_dict()

    @property
    def first(self) -> int:
        """Steps of earlier stages; those of a batch, of seeds and of schedules are counted without them."""
        return 0 if self.span is None else self.span.first

    @property
    def last_step(self) -> int:
        planned = self.first + self.total_steps
        return planned if self.ended_at is None else min(planned, self.ended_at)

    @property
    def is_finished(self) -> bool:
        return self.progress.step >= self.last_step

    def is_due(self, step: int, every: int) -> bool:
        """Whether something that happens every ``every`` steps (0: never) and at the last one is due at ``step``."""
        return step == self.last_step or (every > 0 and (step - self.first) % every == 0)

    def seed_dropout(self, step: int) -> None:
        """Seed torch for a step: the same after a resume, and another on every rank."""
        torch.manual_seed(seed_of(f"{self.cfg.seed}:{step}:{self.world.rank}"))

    def rewind(self) -> None:
        """Undo the draws of the current step: it will not be finished."""
        self.sampler.load_state_dict(self.data_position)
        self.memory.rewind()

    def sync(self, version: int) -> None:
        """Give the engines the current weights; a prefetching engine takes them when it begins a batch."""
        with nullcontext() if self.prefetcher is None else self.prefetcher.publishing(version):
            self.engines.renew(self.model)
        self.engines.current.sync(version)

    def trace_rewards(self, task: Task) -> list[float]:
        """The verifier's rewards for the traces of a task."""
        known = self._trace_rewards.get(task.problem.id)
        if known is None:
            assert self.verifier is not None
            scores = trace_scores(task, self.verifier, self.tokenizer, self.conversations)
            known = [s.value for s in scores]
            if all(s.is_verdict for s in scores):  # else it may succeed next time
                self._trace_rewards[task.problem.id] = known
        return known
