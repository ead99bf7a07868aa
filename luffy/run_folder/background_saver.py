"""Checkpoints of a sharded run: copied to host memory, then written while the training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from luffy.distributed.state import start_saving
from luffy.distributed.world import World
from luffy.run_folder.checkpoint import DISK_ERRORS, SHARDS, CheckpointStore, cannot_be_written


class BackgroundSaver:
    """One checkpoint at a time. Every process writes its shards; the main one adds the model, hashes every file and
    gives the folder its name, so a checkpoint is complete or absent here too."""

    def __init__(self, store: CheckpointStore, world: World) -> None:
        self.store, self.world = store, world
        self._group: Any = dist.new_group(timeout=world.timeout, backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Any] | None = None
        self._step = 0
        self._then: Callable[[], None] = lambda: None

    def start(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        write_model: Callable[[Path], None],
        state: dict[str, Any],
        then: Callable[[], None],
    ) -> None:
        """``write_model`` must hold its own copy of the weights; ``then`` runs on the main process, in its main
        thread, when the checkpoint is complete."""
        self.finish()
        aside = self.world.on_main(lambda: self.store.begin(step))
        written = start_saving(tensors, aside / SHARDS, self._group)
        self._step, self._then = step, then
        if self.world.is_main:
            self._pending = self._thread.submit(self._complete, aside, written, write_model, state)
        else:
            self._pending = written

    def _complete(
        self, aside: Path, written: Future[Any], write_model: Callable[[Path], None], state: dict[str, Any]
    ) -> None:
        write_model(aside)
        written.result()
        self.store.complete(aside, state)

    def poll(self) -> None:
        """Between steps: see to a checkpoint that is complete, without waiting for one that is not."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except (*DISK_ERRORS, CheckpointException) as error:
            cause = disk_error_in(error)
            if cause is None:
                raise
            raise cannot_be_written(self._step, self.store.folder, cause) from error
        if self.world.is_main:
            self._then()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, so that an error does not lose it."""
        self._thread.shutdown(wait=True)


def disk_error_in(error: BaseException) -> BaseException | None:
    """The disk error of this process, or the first one among the gathered failures; None if there is none."""
    if isinstance(error, CheckpointException):
        found = (cause for cause, _ in error.failures.values() if isinstance(cause, DISK_ERRORS))
        return next(found, None)
    return error
