"""What a check gets to measure with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from luffy.config import Config
from luffy.distributed.world import World
from luffy.doctor.board import Board
from luffy.doctor.findings import Cluster, Facts, Line
from luffy.doctor.watch import Watch


@dataclass
class Context:
    """One rank of an examination. ``world`` is joined from the check `connect` on. ``hosts``: host name by rank, known
    after the check `ranks`."""

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
    def launched(self) -> bool:
        """Whether a launcher started this process, be it a single one."""
        return self.cfg.launch != "local"

    @property
    def leads_machine(self) -> bool:
        """Whether this is the first rank of its machine, which measures what its ranks share."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank


@dataclass(frozen=True)
class Check:
    """``measure(context)``: JSON values of one rank, or None where nothing applies. ``judge(cluster, facts)``: lines of
    the report from the values of all ranks that have some. ``together``: ranks exchange data, so an error of one ends
    the examination."""

    name: str
    measure: Callable[[Context], Any]
    judge: Callable[[Cluster, Facts], list[Line]]
    together: bool = False
