"""FSDP2's gathers of weights, counted or held up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather


@contextmanager
def before_each_gather(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before every gather, where a GPU has the gathers' own stream as the current one."""
    gather = DefaultAllGather.__call__

    def gather_after(self, *args, **kwargs):
        act()
        return gather(self, *args, **kwargs)

    with patch.object(DefaultAllGather, "__call__", gather_after):
        yield


def slow_gathers(cycles: int = 20_000_000):
    """Every gather begins 10 ms late. What reads a buffer too early, or gives it away too early, shows then."""
    return before_each_gather(lambda: torch.cuda._sleep(cycles))
