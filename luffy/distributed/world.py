"""The processes of a run, and the few words they exchange.

Every process runs the same trainer. What they must agree on (which groups were kept, denominators,
metrics) is small and goes through ``World.gather``; weights and gradients go through FSDP2. A run of one
process has a world of one, where every exchange gives back what was put in.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from luffy.distributed.follow import LAUNCHER_VARIABLE
from luffy.errors import UserError
from luffy.metrics import Metric, merge_metrics

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """``joined``: the processes are connected, be it a single one (``torchrun --nproc-per-node 1``)."""

    rank: int = 0
    size: int = 1
    joined: bool = False
    device: torch.device | None = None  # where this process computes, once it has joined
    timeout: timedelta = timedelta(minutes=30)  # how long one process waits for the others

    @property
    def is_main(self) -> bool:
        """The process that writes the run folder and speaks to the user."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all processes in the order of their ranks, on every process."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def union(self, mine: Mapping[K, T]) -> dict[K, T]:
        """The entries of all processes, whose keys differ."""
        return {key: value for part in self.gather(dict(mine)) for key, value in part.items()}

    def from_main(self, value: T) -> T:
        """The main process's value, on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, act: Callable[[], T]) -> T:
        """Run ``act`` on the main process and return its result, or raise its UserError, on every process."""
        outcome: tuple[T | None, UserError | None] = (None, None)
        if self.is_main:
            try:
                outcome = (act(), None)
            except UserError as error:
                outcome = (None, error)
        value, mistake = self.from_main(outcome)
        if mistake is not None:
            raise mistake
        return value  # type: ignore[return-value]

    def merge(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Metrics over all processes: each kind adds up as it does over micro-batches."""
        return dict(metrics) if self.size == 1 else merge_metrics(self.gather(dict(metrics)))


def is_launched() -> bool:
    """Whether a launcher started this process: torchrun by its environment, Ray by having connected it."""
    return LAUNCHER_VARIABLE in os.environ or (dist.is_available() and dist.is_initialized())


def lost_a_peer(error: RuntimeError) -> bool:
    """Whether an exchange failed because another process is gone; gloo has no class of its own for that."""
    return is_launched() and (isinstance(error, dist.DistError) or "gloo" in str(error))


def join_world(device: str, timeout_s: float) -> World:
    """Connect to the other processes. Objects and CPU tensors go over gloo, GPU tensors over NCCL."""
    here, timeout = torch.device(device), timedelta(seconds=timeout_s)
    if device == "cuda":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    world = World(dist.get_rank(), dist.get_world_size(), joined=True, device=here, timeout=timeout)
    if device == "cuda":
        let_devices_be_shared(world, str(torch.cuda.get_device_properties(here).uuid))
    return world


def let_devices_be_shared(world: World, uuid: str) -> None:
    """Give each rank whose GPU (``uuid``) another rank uses too a NCCL_HOSTID of its own, unless it has one. NCCL
    refuses two ranks of one machine on one GPU; taken for ranks of different machines, they talk over sockets.
    Must come before NCCL's first message."""
    uuids = world.gather(uuid)
    if uuids.count(uuid) > 1:
        os.environ.setdefault("NCCL_HOSTID", f"{uuid}-{world.rank}")
    if world.is_main and len(set(uuids)) < world.size:
        logger.warning(
            "%d processes share %d GPUs: for tests only, because NCCL exchanges their data over sockets; use one "
            "process a GPU for training",
            world.size,
            len(set(uuids)),
        )


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
