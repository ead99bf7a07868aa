"""One engine for several processes.

A model that does not fit on one GPU next to its sharded weights is rolled out by groups: the first process of a group
has the engine (vLLM spread over the group's GPUs, or the native one), the others hand it their requests and
get their completions back. Tokens do not depend on who asked whom, since noise is a function of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from luffy.distributed.world import World
from luffy.errors import ConfigError
from luffy.metrics import Metric
from luffy.rollout.engine import Engine, OnProgress
from luffy.types import Completion, Request


def leads(world: World, group_size: int) -> bool:
    """Whether this process has its group's engine. The main process always does."""
    return world.rank % group_size == 0


class GroupEngine(Engine):
    """Engine of a group of processes, which all call ``generate`` at the same time; only the leader has ``engine``."""

    def __init__(self, engine: Engine | None, world: World, group_size: int) -> None:
        if world.size % group_size:
            raise ConfigError(f"'parallel.rollout_group' ({group_size}) does not divide the {world.size} processes")
        assert (engine is not None) == leads(world, group_size)
        self.engine, self.size = engine, group_size
        self.leader = world.rank // group_size * group_size
        self._group = self._own_group(world)

    def _own_group(self, world: World) -> Any:
        """Every process takes part in making every group, also those that it is not in."""
        starts = range(0, world.size, self.size)
        groups = {
            start: dist.new_group(list(range(start, start + self.size)), world.timeout, backend="gloo")
            for start in starts
        }
        return groups[self.leader]

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        asked: list[Any] = [None] * self.size
        dist.gather_object(list(requests), asked if self.engine is not None else None, self.leader, self._group)
        answers: list[Any] = [None] * self.size
        if self.engine is not None:
            flat = iter(self.engine.generate([request for part in asked for request in part], progress))
            answers = [[next(flat) for _ in part] for part in asked]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, answers if self.engine is not None else None, self.leader, self._group)
        completions: list[Completion] = mine[0]
        return completions

    def agree_on(self, version: int) -> int:
        """The leader's. A process that rolls out ahead takes the newest version there is when it begins a batch, which
        may not be the leader's newest; yet the leader's weights make the tokens of all."""
        versions = [version]
        dist.broadcast_object_list(versions, self.leader, self._group)
        return versions[0]

    def sync(self, version: int) -> None:
        if self.engine is not None:
            self.engine.sync(version)

    def sleep(self) -> None:
        if self.engine is not None:
            self.engine.sleep()

    def metrics(self) -> dict[str, Metric]:
        return {} if self.engine is None else self.engine.metrics()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
