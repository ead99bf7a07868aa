"""One rank of an examination, and a check."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from luffy.config import Config
from luffy.distributed.world import World
from luffy.doctor.findings import Cluster, Facts, Line
from luffy.doctor.watch import Board, Watch


def device_index() -> int:
    """The index of the GPU that `join_world` takes."""
    return int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()


def pick_device(cfg: Config) -> str:
    """``cuda``, with this rank's GPU chosen, or ``cpu``."""
    if cfg.model.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    torch.cuda.set_device(device_index())
    return "cuda"


@dataclass
class Context:
    """One rank of an examination. ``world`` is joined by the check `connection`. ``hosts``: host name by rank, known
    after the check `processes`."""

    cfg: Config
    rank: int
    size: int
    device: str  # cpu or cuda
    board: Board
    watch: Watch
    limit_s: float
    world: World = field(default_factory=World)
    hosts: list[str] = field(default_factory=list)

    @property
    def leaders(self) -> list[int]:
        """The first rank of each machine, which measures what its ranks share."""
        return [self.hosts.index(host) for host in dict.fromkeys(self.hosts)]


@dataclass(frozen=True)
class Check:
    """``measure(context)``: JSON values of one rank, or None if nothing applies. ``judge(cluster, facts)``: lines of
    the report from the values of all ranks that have some. ``together``: ranks exchange data, so an error of one ends
    the examination. ``remedy``: what to do if measuring fails; ``absent``: why nothing applies."""

    name: str
    measure: Callable[[Context], Any]
    judge: Callable[[Cluster, Facts], list[Line]]
    together: bool = False
    remedy: str = "see the message; set NCCL_DEBUG=INFO for more, and run again on this machine alone (launch=local)"
    absent: str = "does not apply"
