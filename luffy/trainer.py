"""The trainer as scripts and commands use it: the one of train/, with a model card in every checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TextIO

from rich.console import Console

from luffy.config import Config
from luffy.distributed.launch import OnStep
from luffy.distributed.world import World, join_world, leave_world
from luffy.models.machine import pick_device
from luffy.progress import lasting
from luffy.report.model_card import write_cards
from luffy.run_folder.changes import in_words
from luffy.run_folder.checkpoint import CheckpointStore
from luffy.run_folder.layout import METRICS
from luffy.step.run_state import Method
from luffy.train import loop


class Trainer(loop.Trainer):
    __doc__ = loop.Trainer.__doc__
    on_save = staticmethod(write_cards)


def nothing(step: int, values: dict[str, float]) -> None:
    """Ignore a step."""


@dataclass(frozen=True)
class Job:
    """What ``luffy train`` and ``luffy sft`` were asked to do; it travels to the workers as it is."""

    cfg: Config
    method: Method = "rl"
    resume: str = "auto"
    allow_changed_data: bool = False

    def alone(self) -> None:
        self._train(World(), nothing, None)

    def as_worker(self, on_step: OnStep = nothing, out: TextIO | None = None) -> None:
        """In one of several processes that a launcher started; the main one speaks to ``out`` if there is one."""
        world = join_world(pick_device(self.cfg.model.device), self.cfg.parallel.timeout_s)
        self._train(world, on_step, out)
        leave_world()

    def again(self) -> Job:
        """The job that goes on with this one after a step or more: where ``resume`` is never or a path, that is done as
        soon as the run has a checkpoint of its own."""
        own = CheckpointStore(self.cfg.folder / "checkpoints", self.cfg.train.keep)
        return replace(self, resume="auto") if any(own) else self

    def _train(self, world: World, on_step: OnStep, out: TextIO | None) -> None:
        console = None if out is None else Console(file=out, width=200)
        out = lasting(out if out is not None else sys.stdout)
        arguments = (self.cfg, self.method, self.resume, self.allow_changed_data, world, on_step, console)
        with Trainer(*arguments) as trainer:
            lacks = trainer.lacks_evaluation()  # all processes ask
            if trainer.is_finished and world.is_main:
                step, longer = trainer.progress.step, trainer.length_setting
                rest = "its last evaluation is missing" if lacks else f"raise {longer} or choose another name="
                print(f"already finished at step {step}; {rest}", file=out)
                if trainer.start.changes:
                    other = in_words(trainer.start.changes, self.cfg, self.method)
                    print(f"it was trained with other settings: {other}", file=out)
            model, progress = trainer.train(), trainer.progress
        if world.is_main:
            print(f"model      {model}", file=out)
            print(f"metrics    {self.cfg.folder / METRICS}", file=out)
            if progress.best_step is not None:
                print(f"best       step {progress.best_step}, held-out accuracy {progress.best_accuracy:.4g}", file=out)
