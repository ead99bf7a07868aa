"""JSON values that ranks publish for each other in torch's key-value store."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Board:
    """One connection to the store. The watching thread has a connection of its own, because one serves one thread at
    a time."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value, or None as long as there is none. Does not wait."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def wait(self, key: str) -> Any:
        """The value once there is one. The rank's watch bounds the time."""
        while (value := self.get(key)) is None:
            time.sleep(0.05)
        return value


def own_boards() -> tuple[Board, Board]:
    """Two connections of a process without ranks."""
    store = dist.HashStore()
    return Board(store), Board(store)


def open_boards(rank: int, timeout_s: float) -> tuple[Board, Board]:
    """Two connections to the store through which the launcher lets the ranks find each other. torchrun keeps it in its
    own process, Ray in rank 0."""
    elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or dist.is_initialized()

    def connect(keeps: bool) -> Board:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=keeps,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return Board(dist.PrefixStore("luffy-doctor", store))

    return connect(rank == 0 and not elsewhere), connect(False)
