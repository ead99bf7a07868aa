"""The state of a run as one value.

``build_run`` (build.py) makes it. The step (training_step.py), saving, recording and held-out evaluation take it; they
know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.distributed.world import World
from luffy.guidance import Gate, Planner
from luffy.metrics import Metric
from luffy.report.changes import Changes
from luffy.report.console import RunView
from luffy.report.timing import Stopwatch
from luffy.rewards import Verifier
from luffy.rollout.engine import Engine
from luffy.train.background_saver import BackgroundSaver
from luffy.train.build_engines import Engines
from luffy.train.checkpoint import CheckpointStore
from luffy.train.groups import verified
from luffy.train.method_memory import MethodMemory
from luffy.train.policy import Policy
from luffy.train.prefetch import Prefetcher
from luffy.train.saved_state import Progress
from luffy.train.scorer import TokenScorer
from luffy.train.tasks import TaskSet
from luffy.train.teacher import Teacher
from luffy.train.under_way import UnderWay
from luffy.types import Group, Task

Method = Literal["rl", "sft"]


@dataclass(frozen=True)
class Draw:
    """A problem of a step by its row in the data, how often it was drawn before, and who drew it."""

    row: int
    visit: int
    source: Literal["data", "replay", "experts"] = "data"


@dataclass(frozen=True)
class RolloutBatch:
    """This rank's groups of a batch by position in the step, where their problems come from, the sampler's state after
    drawing it, and what was measured. ``first``: the same groups before a gate changed any. ``seconds`` by phase: of a
    batch that was made in another thread. ``under_way``, by position too: problems that are not finished yet."""

    groups: dict[int, Group]
    draws: dict[int, Draw]
    sampler: dict[str, int]
    first: Sequence[Group]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    under_way: Mapping[int, UnderWay] = field(default_factory=dict)


@dataclass
class Messages:
    """What the user is told. Warnings wait in ``notices`` while there is no view to show them."""

    facts: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    view: RunView | None = None

    def warn(self, text: str) -> None:
        if self.view is None:
            self.notices.append(text)
        else:
            self.view.warn(text)

    def count(self, done: int, total: int) -> None:
        """How far the phase under way is."""
        if self.view is not None:
            self.view.count(done, total)


@dataclass
class Run:
    """One process's part of a run. In a ``world`` of several all processes go through the same steps, each with its
    share of the problems; rank 0 alone writes the run folder and speaks to the user."""

    cfg: Config
    method: Method
    world: World
    device: str
    messages: Messages
    watch: Stopwatch
    closing: ExitStack  # what `close` ends

    tokenizer: Any
    eos_ids: tuple[int, ...]
    tasks: TaskSet
    eval_tasks: dict[str, list[Task]]  # held-out sets by name; "core" is data.eval
    eval_report: dict[str, int]
    total_steps: int

    model: Any
    policy: Policy
    reference: TokenScorer | None
    teacher: Teacher | None
    engines: Engines
    engine: Engine  # makes the rollouts; `engines.current` always has the newest weights
    before_step: Callable[[int], None]  # moves the schedule of token overrides
    prefetcher: Prefetcher[RolloutBatch] | None  # with async.max_staleness
    verifier: Verifier | None  # none in SFT without held-out problems
    sampler: ProblemSampler
    planner: Planner
    gate: Gate | None
    memory: MethodMemory

    store: CheckpointStore
    saver: BackgroundSaver | None  # writes the checkpoints of several processes
    base: str | None  # with LoRA: what the weights below the adapters are known by

    progress: Progress = field(default_factory=Progress)
    data_position: dict[str, int] = field(default_factory=dict)  # the sampler's state where the next step begins
    evaluated: dict[int, float] = field(default_factory=dict)  # held-out accuracy by step, of those on record
    origin: Path | None = None  # the run folder of the checkpoint it goes on from, its own or another run's; if known
    has_judged_reward: bool = False  # whether the scores of this process's first step were compared with reward.success
    changes: Changes = field(default_factory=dict)  # settings that differ from those before the resume
    _trace_rewards: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data_position = self.sampler.state_dict()

    @property
    def is_finished(self) -> bool:
        return self.progress.step >= self.total_steps

    @property
    def length_knob(self) -> str:
        """The setting that says how long the training is."""
        return "train.epochs" if self.cfg.train.steps is None else "train.steps"

    def data_report(self) -> dict[str, dict[str, int]]:
        """What is in data.json: rows that are used and left out, problems of each held-out set, and how many processes
        and GPUs train."""
        sizes = {name: len(tasks) for name, tasks in self.eval_tasks.items()}
        run = {"processes": self.world.size, "gpus": self.world.size if self.model.device.type == "cuda" else 0}
        return {"train": self.tasks.report, "eval": self.eval_report, "held_out": sizes, "run": run}

    def is_due(self, step: int, every: int) -> bool:
        """Whether what happens every so many steps (0: never), and always at the last one, happens at ``step``."""
        return step == self.total_steps or (every > 0 and step % every == 0)

    def rewind(self) -> None:
        """Draw again what the step under way drew: it will not be finished."""
        self.sampler.load_state_dict(self.data_position)
        self.memory.rewind()

    def sync(self, version: int) -> None:
        """Give the engines the weights as they are now. A prefetching engine takes them when it begins a batch."""
        with nullcontext() if self.prefetcher is None else self.prefetcher.publishing(version):
            self.engines.renew(self.model)
        self.engines.current.sync(version)

    def trace_rewards(self, task: Task) -> list[float]:
        """The verifier's scores of a task's traces."""
        known = self._trace_rewards.get(task.problem.id)
        if known is None:
            assert self.verifier is not None
            traces = [(task, demo.token_ids) for demo in task.demonstrations]
            scores = verified(traces, self.verifier, self.tokenizer)
            known = [s.value for s in scores]
            if all(s.is_verdict for s in scores):  # else it may succeed next time
                self._trace_rewards[task.problem.id] = known
        return known
