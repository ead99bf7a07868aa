"""The hardware that a run is meant for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from luffy.config import Config
from luffy.dry_run.cost import GPUS, Gpu
from luffy.errors import UserError
from luffy.models.load import slow_dtype
from luffy.models.machine import memory_of_machine, pick_device
from luffy.rollout.native import default_slots
from luffy.rollout.vllm.http_client import VLLM_SLOTS


@dataclass(frozen=True)
class Place:
    """A GPU or the CPU of this machine, or a ``rented`` GPU, which need not be there. Memory in bytes."""

    on_gpu: bool
    free: float
    total: float
    name: str
    rented: str | None = None
    notices: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, cfg: Config, gpu: str | None = None, price: float | None = None) -> Place:
        """The GPU that is named; else H200s for several processes that do not ask for a CPU on a machine without a GPU;
        else this machine. ``price``: of an hour of one GPU."""
        several = cfg.model.device != "cpu" and cfg.launch != "local"
        if gpu is not None:
            return cls.with_gpu(gpu, f"a rented {gpu.upper()}")
        if several and not torch.cuda.is_available():
            return cls.with_gpu("h200", "a rented H200", [no_gpu_notice(cfg)])
        on_gpu = pick_device(cfg.model.device) == "cuda"
        if price is not None and not on_gpu:
            raise UserError("--gpu-price is for GPUs, and this run is meant for the CPU: name one with --gpu")
        return cls(on_gpu, *memory_of_machine(on_gpu))

    @classmethod
    def with_gpu(cls, gpu: str, name: str, notices: Sequence[str] = ()) -> Place:
        """A GPU that the cost model knows."""
        memory = gpu_named(gpu).memory
        return cls(True, memory, memory, name, gpu, list(notices))

    def slow_dtypes(self, cfg: Config, method: str) -> list[str]:
        """A remark if this CPU is slow with the dtype of the policy or the second model."""
        knobs = cfg.rollout.overrides if method == "rl" else None
        dtypes = {cfg.model.dtype, (knobs.dtype if knobs else None) or cfg.model.dtype}
        return [] if self.on_gpu else [remark for dtype in dtypes if (remark := slow_dtype(dtype, "cpu"))][:1]


def gpu_named(name: str) -> Gpu:
    """The rates of a GPU that the cost model knows."""
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: the cost model knows {', '.join(GPUS)}")
    return GPUS[name.lower()]


def engine_slots(cfg: Config, on_gpu: bool) -> int:
    """Sequences that the engine decodes at once; no more episodes than environments may be open."""
    most = VLLM_SLOTS if cfg.rollout.engine == "vllm" else default_slots("cuda" if on_gpu else "cpu")
    slots = cfg.rollout.slots or most
    return slots if cfg.environment is None else min(slots, cfg.environment.at_once)


def no_gpu_notice(cfg: Config) -> str:
    """What happens to a run of several processes on a machine without a GPU."""
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
