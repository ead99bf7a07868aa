"""The trainer as scripts and commands use it: the one of train/, with a model card in every checkpoint;
and the stages of a run, one after the other in one run folder.

Each stage is a training of its own: its first step is step 0 for schedules, seeds and the order of the data, its model
is the checkpoint that the stage before handed on, and optimizer, sampler and memory begin anew. On disk the steps are
counted through. So a run with stages is, bit for bit, what its stages are as runs that name the model of the last.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TextIO, TypeVar

import torch
from rich.console import Console

from luffy.config import Config, Method, Stage, stages_of
from luffy.distributed.launch import OnStep
from luffy.distributed.world import World, join_world, leave_world
from luffy.errors import UserError
from luffy.models.machine import pick_device
from luffy.progress import lasting
from luffy.report.model_card import write_cards
from luffy.run_folder.changes import in_words
from luffy.run_folder.checkpoint import Checkpoint, CheckpointStore
from luffy.run_folder.layout import METRICS
from luffy.run_folder.stages import FinishedStage, Span, StageFile, check_unchanged, read_stages, settings_of
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

        make = partial(
            Trainer, allow_changed_data=self.allow_changed_data, world=world, on_step=on_step, console=console
        )
        trained: list[str] = []

        def act(trainer: Trainer) -> None:
            _train_one(trainer, out)
            trained.append(trainer.cfg.name)

        each_stage(make, self.cfg, self.method, world, self.resume, act)
        if not trained and world.is_main:
            print("already finished: no stage is left; add one, or choose another name=", file=out)


def _train_one(trainer: Trainer, out: TextIO) -> None:
    """Train a run, or a stage of one, to its end, and say where its model is."""
    lacks, world, cfg, span = trainer.lacks_evaluation(), trainer.run.world, trainer.cfg, trainer.run.span
    if trainer.is_finished and world.is_main:
        step, longer = trainer.progress.step, trainer.length_setting
        if span is not None and span.ending is not None and span.ending.step == step:  # whatever the number of steps
            what = "seconds" if span.ending.ended_by == "seconds" else "until"
            longer = f"change stages.{span.stage.name}.{what}, which ended it,"
        else:
            longer = f"raise {longer}"
        rest = "its last evaluation is missing" if lacks else f"{longer} or choose another name="
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


T = TypeVar("T", bound=loop.Trainer)
Make = Callable[..., AbstractContextManager[T]]  # gets the config, the method, ``resume`` and the ``span`` of a stage


def each_stage(
    make: Make[T], cfg: Config, method: Method, world: World, resume: str, act: Callable[[T], object]
) -> None:
    """Call ``act``, which trains to the end, with the trainer of each stage that is left; or with that of the run."""
    stages = stages_of(cfg)
    if not stages:
        with make(cfg, method, resume) as trainer:
            act(trainer)
        return
    if resume not in ("auto", "never"):
        raise UserError(f"--resume {resume} names one checkpoint, and this run has stages; use auto, or stages={{}}")
    record = StageFile() if resume == "never" else world.on_main(lambda: read_stages(cfg.folder))
    check_unchanged(record.finished, stages)
    for stage in stages[len(record.finished) :]:
        done = record.finished
        trained, span = world.on_main(lambda stage=stage, done=done: place(cfg, stage, done))  # type: ignore[misc]
        with make(trained, stage.method, "auto" if done else resume, span=span) as trainer:
            act(trainer)
            ended = trainer.is_finished
            if ended and stage.number < len(stages):
                world.on_main(lambda trainer=trainer, stage=stage: finish(trainer, stage))  # type: ignore[misc]
        if not ended:
            return
        record = world.on_main(lambda: read_stages(cfg.folder))
        del trainer
        free_memory()


def place(cfg: Config, stage: Stage, done: tuple[FinishedStage, ...]) -> tuple[Config, Span]:
    """The config that a stage is trained with behind finished ones, and its place in the run."""
    ending = read_stages(cfg.folder).ending_of(stage)
    if not done:
        return stage.cfg, Span(stage, cfg, ending=ending)
    last, store = done[-1], CheckpointStore(cfg.folder / "checkpoints", cfg.train.keep)
    checkpoint = next((found for found in store if found.step == last.handed_on), None)
    if checkpoint is None:
        raise UserError(
            f"stage {last.name} is finished, but {store.folder} has no checkpoint of step {last.handed_on}, with which "
            f"stage {stage.name} begins; bring it back, or choose another name="
        )
    told = f"stage {stage.name} begins after step {last.last} with {checkpoint.path}; {stage.ending}"
    handed_on = frozenset(finished.handed_on for finished in done)
    return _beginning_with(stage.cfg, checkpoint), Span(stage, cfg, last.last, ending, handed_on, (told,))


def _beginning_with(cfg: Config, checkpoint: Checkpoint) -> Config:
    """The config with the model of a checkpoint; prompts keep the date that they had."""
    date = cfg.data.date if cfg.data.date is not None else checkpoint.state().get("date")
    return replace(cfg, model=replace(cfg.model, path=str(checkpoint.model)), data=replace(cfg.data, date=date))


def finish(trainer: loop.Trainer, stage: Stage) -> None:
    """Put a stage on record whose last checkpoint is on the disk."""
    folder, progress, span = trainer.cfg.folder, trainer.progress, trainer.run.span
    assert span is not None
    before = read_stages(folder)
    ending = before.ending_of(stage)
    handed_on = progress.step
    if stage.knobs.hand_on == "best":
        assert progress.best_step is not None, "the last step is evaluated, so some step is the best"
        handed_on = progress.best_step
    by = "steps" if ending is None or ending.step != progress.step else ending.ended_by
    done = FinishedStage(stage.name, stage.method, span.first, progress.step, by, handed_on, settings_of(stage))
    StageFile((*before.finished, done)).write(folder)


def free_memory() -> None:
    """Give back what the last stage held, before the next is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
