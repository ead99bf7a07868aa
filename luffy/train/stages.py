"""Trains the stages of a run one after the other, in one run folder; a plain run is trained as it is.

Each stage is a training of its own: its first step is step 0 for schedules, seeds and the order of the data, its model
is the checkpoint that the stage before handed on, and optimizer, sampler and memory begin anew. On disk the steps are
counted through. So a run with stages is, bit for bit, what its stages are as runs that name the model of the last.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

import torch

from luffy.config import Config, Method, stages_of
from luffy.config.stages import Stage
from luffy.distributed.world import World
from luffy.errors import UserError
from luffy.run_folder.checkpoint import Checkpoint, CheckpointStore
from luffy.run_folder.stages import FinishedStage, Span, StageFile, check_unchanged, read_stages, settings_of
from luffy.train.loop import Trainer

T = TypeVar("T", bound=Trainer)
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


def finish(trainer: Trainer, stage: Stage) -> None:
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
