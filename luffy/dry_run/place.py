"""Where a run is meant to be made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from luffy.config import Config
from luffy.dry_run.gpu_cost import gpu_named
from luffy.models.memory import memory_of_machine
from luffy.train import setup


@dataclass(frozen=True)
class Renting:
    """GPUs to estimate for: ``gpu`` by name (None: this machine's, or h200 where it has none), and what an hour of one
    costs."""

    gpu: str | None = None
    price: float | None = None


@dataclass(frozen=True)
class Place:
    """Where the run is meant to be made: on a GPU or the CPU of this machine, or on a ``rented`` GPU, which need not be
    there. Memory in bytes."""

    on_gpu: bool
    free: float
    total: float
    name: str
    rented: str | None = None
    notice: str | None = None

    @classmethod
    def of(cls, cfg: Config, renting: Renting) -> Place:
        """A GPU that is named is meant. Several processes that ask for no CPU are meant for GPUs, H200s where this
        machine has none."""
        several = cfg.model.device != "cpu" and cfg.launch != "local"
        absent = renting.gpu is None and several and not torch.cuda.is_available()
        rented = "h200" if absent else renting.gpu
        if rented is None:
            on_gpu = setup.pick_device(cfg.model.device) == "cuda"
            return cls(on_gpu, *memory_of_machine(on_gpu))
        memory = gpu_named(rented).memory
        notice = no_gpu_notice(cfg) if absent else None
        return cls(True, memory, memory, f"a rented {rented.upper()}", rented, notice)


def no_gpu_notice(cfg: Config) -> str:
    """What a run of several processes meets on a machine without a GPU."""
    workers = cfg.parallel.workers
    here = f"a run started here would train on the CPU in {workers} processes"
    if cfg.model.device == "cuda":
        here = "a run started here would end with an error"
    elif cfg.launch == "ray":
        here = "Ray needs nodes that have one"
    return (
        f"this machine has no GPU: memory and cost are for {workers} x H200, and {here}; name other GPUs with "
        "--gpu, or set model.device=cpu to estimate for this CPU"
    )
