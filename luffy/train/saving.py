"""Saving checkpoints: writing them, and keeping ``latest``, ``best.json`` and their number in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from luffy.errors import UserError
from luffy.files import json_object, write_atomically
from luffy.run_folder.background_saver import BackgroundSaver
from luffy.run_folder.checkpoint import DISK_ERRORS, CheckpointStore, cannot_be_written
from luffy.run_folder.layout import BEST, CARD
from luffy.run_folder.saved_state import Progress
from luffy.train.held_out import loss_of
from luffy.train.weights import Export


@dataclass
class Saver:
    """``export`` writes the model, on the main process alone. ``background`` writes the checkpoints of several
    processes. ``snapshot`` takes the rest of the run: the content of state.json and the tensors. ``on_save`` gets the
    folder of every new checkpoint. ``by_loss``: the best step is that of the lowest held-out loss."""

    store: CheckpointStore
    export: Export | None
    background: BackgroundSaver | None
    snapshot: Callable[[], tuple[dict[str, Any], dict[str, Tensor]]]
    warn: Callable[[str], None]
    on_save: Callable[[Path], None] = lambda folder: None
    by_loss: bool = False

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the last finished step; several processes do it in the background."""
        taken = replace(progress)
        state, tensors = self.snapshot()
        if self.background is not None:
            write = (lambda folder: None) if self.export is None else self.export.copied().write
            self.background.start(taken.step, tensors, write, state, lambda: self._after(taken))
            return
        assert self.export is not None
        try:
            self.store.save(taken.step, self.export.write, tensors, state)
        except DISK_ERRORS as error:
            raise cannot_be_written(taken.step, self.store.folder, error) from error
        self._after(taken)

    def _after(self, progress: Progress) -> None:
        self._pass_on(self.store.folder / f"step-{progress.step:06d}")
        self.tidy(progress)

    def _pass_on(self, checkpoint: Path) -> None:
        """Call ``on_save``; its failure must not end a training."""
        try:
            self.on_save(checkpoint)
        except Exception as error:
            self.warn(f"{checkpoint} has no model card: {type(error).__name__}: {error}")

    def take_up(self, progress: Progress) -> None:
        """Finish what a kill after a save left undone: the model card of the newest checkpoint, and tidying."""
        newest = next(iter(self.store), None)
        if newest is not None and not (newest.model / CARD).exists():
            self._pass_on(newest.path)
        self.tidy(progress)

    def poll(self) -> None:
        """Between steps: see to a checkpoint that is complete, without waiting for one that is not."""
        if self.background is not None:
            self.background.poll()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self.background is not None:
            self.background.finish()

    def has(self, step: int) -> bool:
        return any(checkpoint.step == step for checkpoint in self.store)

    def tidy(self, progress: Progress) -> None:
        """Bring ``latest``, ``best.json`` and the kept checkpoints in line with those that exist. ``progress``: that of
        the newest checkpoint."""
        record = self.store.folder.parent / BEST
        best = _recorded_best(record) if progress.best_step is None else progress.best_step
        self.store.tidy(best)
        if progress.best_step is not None:
            write_atomically(record, json.dumps({"step": best, **self.best_value(progress)}))

    def best_value(self, progress: Progress) -> dict[str, float]:
        """What the best step reached, by its name."""
        score = progress.best_accuracy
        return {"loss": loss_of(score)} if self.by_loss else {"accuracy": score}


def _recorded_best(record: Path) -> int | None:
    """Best step recorded before the evaluation changed, kept until there is a new one; None without a readable file."""
    with suppress(OSError, UserError):
        return int(json_object(record.read_bytes(), record, "", step=int)["step"])
    return None
