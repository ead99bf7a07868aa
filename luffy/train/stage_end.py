"""When a stage ends before its planned steps: no better evaluation for a while, or no time left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from luffy.config.stages import StageKnobs
from luffy.distributed.world import World
from luffy.metrics import training_seconds
from luffy.run_folder.layout import METRICS
from luffy.run_folder.recorder import read_json_lines
from luffy.run_folder.stages import Ending, Span, read_stages
from luffy.schema import to_dict
from luffy.train.held_out import loss_of


@dataclass
class StageEnd:
    """Decides in every step whether the stage ends; all processes ask, and the main one's answer counts. ``spent``:
    seconds of the stage's steps on record."""

    span: Span
    world: World
    folder: Path
    spent: float = 0.0

    @classmethod
    def of(cls, span: Span, world: World, folder: Path, through_step: int) -> StageEnd:
        """As it was after a step of the run."""
        rows = world.on_main(lambda: read_json_lines(folder / METRICS, step=int))
        spent = sum(training_seconds(row) for row in rows if span.first < row["step"] <= through_step)
        return cls(span, world, folder, spent)

    @property
    def knobs(self) -> StageKnobs:
        return self.span.stage.knobs

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Count the seconds of a step on record; an evaluation before the first step is not the stage's."""
        if step > self.span.first:
            self.spent += training_seconds(values)

    def is_out_of_time(self, step_seconds: float) -> bool:
        limit = self.knobs.seconds
        return limit is not None and self.world.from_main(self.spent + step_seconds >= limit)

    def is_flat(self, evaluated: Mapping[int, float]) -> bool:
        """``evaluated``: the score by step, of the evaluations on record."""
        if self.knobs.until == "steps":
            return False
        first = self.span.first
        scores = [score for step, score in sorted(evaluated.items()) if step > first or not first]
        if self.span.stage.by_loss:
            scores = [-loss_of(score) for score in scores]
        return self.world.from_main(without_gain(scores, self.knobs.min_delta) >= self.knobs.patience)

    def decide(self, step: int, ended_by: str) -> None:
        """Put the decision to end after ``step`` on record."""
        ending = Ending(self.span.stage.name, step, ended_by, to_dict(self.knobs))
        self.world.on_main(lambda: replace(read_stages(self.folder), ending=ending).write(self.folder))


def without_gain(scores: list[float], least: float) -> int:
    """How many of the last scores were no better, by more than ``least``, than the best before them."""
    best, count = -math.inf, 0
    for score in scores:
        gained = score > best + least
        best, count = (score, 0) if gained else (best, count + 1)
    return count
