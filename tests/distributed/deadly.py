"""A job whose worker kills itself once at a chosen moment; importable by Ray's workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from luffy.learn.policy import Policy
from luffy.rollout.native import NativeEngine
from luffy.run_folder import background_saver
from luffy.trainer import Job


@dataclass(frozen=True)
class DeadlyJob(Job):
    moment: str = ""
    victim: int = 0
    marker: str = ""

    def as_worker(self, *args, **kwargs):
        import ray

        with open(self.marker, "a") as file:
            file.write(ray.get_runtime_context().get_node_id() + "\n")
        if int(os.environ["RANK"]) == self.victim:
            MOMENTS[self.moment](self.die_once)
        super().as_worker(*args, **kwargs)

    def die_once(self):
        """Not before there is a checkpoint to resume from, and not a second time."""
        died, checkpoint = Path(self.marker).with_suffix(".died"), self.cfg.folder / "checkpoints" / "step-000002"
        if checkpoint.exists() and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def in_rollout(die):
    """When the first responses of a batch are there and the others are still in the making."""
    generate = NativeEngine.generate
    NativeEngine.generate = lambda self, requests, _=None, *more: generate(self, requests, lambda *_: die(), *more)


def in_update(die):
    """Between the backward pass of a micro-batch and the next."""
    accumulate = Policy._accumulate

    def deadly(self, *args):
        stats = accumulate(self, *args)
        die()
        return stats

    Policy._accumulate = deadly


def in_checkpoint(die):
    """While the files of the second checkpoint are being written in the background."""
    start, folders = background_saver.start_saving, []

    def deadly(tensors, folder, group):
        future = start(tensors, folder, group)
        folders.append(folder)
        if len(folders) == 2:
            threading.Thread(target=lambda: (_until_there(folder), die()), daemon=True).start()
            time.sleep(5)
        return future

    background_saver.start_saving = deadly


def _until_there(folder):
    while not any(folder.glob("*.safetensors")):
        time.sleep(0.001)


MOMENTS = {"rollout": in_rollout, "update": in_update, "checkpoint": in_checkpoint, "never": lambda die: None}
