"""What the steps of a run work on, as one value: train/build.py makes it, the step (training_step.py) takes it; and the
batch of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from luffy.metrics import Metric
from luffy.rewards import Verifier
from luffy.rollout.engine import Engine
from luffy.run_folder.console import RunView
from luffy.run_folder.saved_state import Progress
from luffy.run_folder.stages import Span
from luffy.run_folder.timing import Stopwatch
from luffy.seeds import seed_of
from luffy.step.groups import trace_scores
from luffy.step.memory import Attempt, InFlight, MethodMemory, Success
from luffy.step.prefetch import Prefetcher
from luffy.step.tasks import TaskSet
from luffy.types import Group, Sample, Task


@dataclass(frozen=True)
class Draw:
    """A problem of a step: its row in the data, how often it was drawn before, its position in the step, and who drew
    it. A problem in flight goes on; a replayed one has an earlier success of the policy."""

    row: int
    visit: int
    position: int
    task: Task
    source: Literal["data", "replay", "experts"] = "data"
    in_flight: InFlight | None = None
    replayed: Success | None = None


@dataclass
class StepBatch:
    """What one step trains on; its stages (training_step.py) fill it.

    Groups are numbered over all ranks: the ``size`` kept ones first, then the rejected ones; ``groups``, ``rejected``
    and ``samples`` hold this rank's, by that number. In SFT a group is one trace, and there are samples alone.
    ``version``: of the policy that rolls it out. ``sampler``, ``in_flight`` and ``attempts``: what the run knows once
    the step counts.
    """

    step: int
    version: int
    watch: Stopwatch
    progress: Callable[[int, int], None]
    metrics: dict[str, Metric] = field(default_factory=dict)
    sampler: dict[str, int] = field(default_factory=dict)
    size: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    rejected: dict[int, Group] = field(default_factory=dict)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    in_flight: list[InFlight] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    lessons: list[list[Sample]] = field(default_factory=list)  # traces, of an SFT step each

    # Before the groups are numbered, by position in the step: this rank's, and over all ranks what is kept.
    draws: dict[int, Draw] = field(default_factory=dict)
    initial: dict[int, Group] = field(default_factory=dict)  # before a gate changed any
    final: dict[int, Group] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    drawn: int = 0  # problems, over all ranks

    def number(self, most: int | None) -> None:
        """Number the groups, of which at most ``most`` are kept."""
        kept = self.kept[:most]
        self.size = len(kept)
        self.groups = {i: self.final[p] for i, p in enumerate(kept) if p in self.final}
        self.rejected = {self.size + i: self.final[p] for i, p in enumerate(self.dropped) if p in self.final}

    def mini_batches(self, parts: int) -> Iterator[list[Sample]]:
        """This rank's samples of every mini-batch, as many mini-batches on every rank."""
        return mini_batches([self.samples.get(i, []) for i in range(self.size)], parts)


def mini_batches(groups: Sequence[Sequence[Sample]], parts: int) -> Iterator[list[Sample]]:
    """The samples of the groups in ``parts`` mini-batches, whose numbers of groups differ by one at most. With fewer
    groups than ``parts`` each group is a mini-batch, and without a group there is none."""
    size, parts = len(groups), min(parts, len(groups))
    for part in range(parts):
        members = groups[size * part // parts : size * (part + 1) // parts]
        yield [sample for group in members for sample in group]


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
