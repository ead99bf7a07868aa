"""The trainer as scripts and commands use it: the one of train/, with a model card in every checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TextIO

from rich.console import Console

from luffy.config import Config, Method
from luffy.distributed.launch import OnStep
from luffy.distributed.world import World, join_world, leave_world
from luffy.models.machine import pick_device
from luffy.progress import lasting
from luffy.report.model_card import write_cards
from luffy.run_folder.changes import in_words
from luffy.run_folder.checkpoint import CheckpointStore
from luffy.run_folder.layout import METRICS
from luffy.train import loop
from luffy.train.stages import each_stage


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

        make = partial(
            Trainer, allow_changed_data=self.allow_changed_data, world=world, on_step=on_step, console=console
        )
        each_stage(make, self.cfg, self.method, world, self.resume, lambda trainer: _train_one(trainer, out))


def _train_one(trainer: Trainer, out: TextIO) -> None:
    """Train a run, or a stage of one, to its end, and say where its model is."""
    lacks, world, cfg, span = trainer.lacks_evaluation(), trainer.run.world, trainer.cfg, trainer.run.span
    if trainer.is_finished and world.is_main:
        step, longer = trainer.progress.step, trainer.length_setting
        rest = "its last evaluation is missing" if lacks else f"raise {longer} or choose another name="
        print(f"already finished at step {step}; {rest}", file=out)
        if trainer.start.changes:
            other = in_words(trainer.start.changes, cfg, trainer.run.method)
            print(f"it was trained with other settings: {other}", file=out)
    model, progress = trainer.train(), trainer.progress
    if world.is_main:
        if span is not None:
            print(
                f"stage      {span.stage.name}, {progress.step - span.first} steps, to step {progress.step}", file=out
            )
        print(f"model      {model}", file=out)
        print(f"metrics    {cfg.folder / METRICS}", file=out)
        for name, value in trainer.saver.best_value(progress).items() if progress.best_step is not None else ():
            print(f"best       step {progress.best_step}, held-out {name} {value:.4g}", file=out)


def train_stages(cfg: Config, resume: str = "auto", act: Callable[[Trainer], object] = Trainer.train) -> None:
    """Train all stages of a run in this process, or a plain run; ``act`` gets the trainer of each and trains it."""
    each_stage(Trainer, cfg, cfg.made_for, World(), resume, act)
