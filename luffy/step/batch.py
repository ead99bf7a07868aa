"""The batch of one step: what it draws, keeps and trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from luffy.metrics import Metric
from luffy.run_folder.timing import Stopwatch
from luffy.step.memory import Attempt, InFlight, Success
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
