"""The store through which ranks tell each other how far they are, and the thread that names a rank that hangs.

Every rank publishes how far it is. A thread of it renews that value, so that a stopped process shows by a value that
no longer changes. The first rank that lives speaks: when a rank has not moved for the time limit, it reports who is
behind the others, with the results so far, and ends the examination. ``Context`` is all that a check is given.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from luffy.config import Config
from luffy.distributed.world import World
from luffy.models.machine import use_threads

GRACE_S = 5.0  # for the other ranks to end too, after one has failed
PACKAGE = str(Path(__file__).parents[1])


class Board:
    """JSON values that ranks publish for each other, by one connection to the store. The watching thread has another,
    because a connection serves one thread at a time."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def put(self, key: str, value: Any) -> None:
        """Publish a value."""
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
    address, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout_s)

    def connect(keeps: bool) -> Board:
        store = dist.TCPStore(
            address, port, is_master=keeps, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
        return Board(dist.PrefixStore("luffy-doctor", store))

    return connect(rank == 0 and not elsewhere), connect(False)


@dataclass(frozen=True)
class Progress:
    """The position of a rank: the number of its check, and of the meeting with other ranks that it waits for in it."""

    check: int = -1
    meeting: int = 0
    ended: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Hang:
    """``ranks`` hold up the others at check number ``check``; all of them if none is behind. ``where``: the line that
    each is at. ``stopped``: they no longer answer at all. ``failed``: an error ended them, others wait.
    ``no_store``: the store does not answer, so nothing is known of other ranks."""

    check: int
    ranks: tuple[int, ...]
    where: dict[int, str]
    stopped: bool = False
    failed: bool = False
    no_store: bool = False


class Seen:
    """One rank's view of another: its last values, and when they changed by this rank's clock."""

    def __init__(self, now: float) -> None:
        self.progress, self.where = Progress(), ""
        self.moved = self.renewed = now
        self._beat: Any = None

    def look(self, state: dict[str, Any] | None, now: float) -> None:
        if state is None:
            return
        if state["beat"] != self._beat:
            self._beat, self.renewed, self.where = state["beat"], now, state["where"]
        progress = Progress(**state["progress"])
        if progress != self.progress:
            self.progress, self.moved = progress, now


class Watch:
    """``speak(hang)`` is called in the watching thread of one rank; ``end(code)`` then on all."""

    def __init__(
        self,
        board: Board,
        rank: int,
        size: int,
        limit_s: float,
        speak: Callable[[Hang], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._board, self._rank, self._size, self._limit = board, rank, size, limit_s
        self._speak, self._end = speak, end
        self._progress = Progress()
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def enter(self, check: int) -> None:
        """This rank begins with a check."""
        self._progress = Progress(check)

    def meet(self) -> None:
        """This rank is about to wait for the others."""
        self._progress = replace(self._progress, meeting=self._progress.meeting + 1)

    def leave(self, failed: bool = False) -> None:
        """This rank has nothing more to measure."""
        self._progress = replace(self._progress, ended=True, failed=failed)

    def _run(self) -> None:
        now, beat = time.monotonic(), 0
        seen = [Seen(now) for _ in range(self._size)]
        while not self._stop.wait(min(0.5, self._limit / 20)):
            beat += 1
            try:
                hang = self._look(seen, beat)
            except dist.DistError:  # rank 0 keeps the store, except under torchrun, with whose end this process ends
                hang = Hang(self._progress.check, (0,), {}, stopped=True, no_store=True)
            if hang is not None:
                self._speak(hang)
                self._end(1)
                return

    def _look(self, seen: list[Seen], beat: int) -> Hang | None:
        """Publish this rank's state, read the others'; a Hang where this rank has to speak of one."""
        state = {"beat": beat, "progress": vars(self._progress), "where": self._line()}
        self._board.put(f"state/{self._rank}", state)
        if self._board.get("verdict") is not None:
            if not self._progress.ended:
                self._end(1)
            return None
        for rank in range(self._rank):
            seen[rank].look(self._board.get(f"state/{rank}"), time.monotonic())
            if time.monotonic() - seen[rank].renewed < self._limit:
                return None  # a rank before this one lives, and speaks
        for rank in range(self._rank, self._size):
            seen[rank].look(self._board.get(f"state/{rank}"), time.monotonic())
        return self._hang(seen, time.monotonic())

    def _hang(self, seen: list[Seen], now: float) -> Hang | None:
        waiting = {rank: one for rank, one in enumerate(seen) if not one.progress.ended}
        failed = {rank: one for rank, one in enumerate(seen) if one.progress.failed}
        if waiting and failed and now - min(one.moved for one in failed.values()) > GRACE_S:
            return Hang(min(one.progress.check for one in failed.values()), tuple(failed), {}, failed=True)
        if all(now - one.moved < self._limit for one in waiting.values()):
            return None
        stopped = {rank: one for rank, one in enumerate(seen) if now - one.renewed > self._limit / 2}
        order = {rank: (one.progress.check, one.progress.meeting) for rank, one in (stopped or waiting).items()}
        behind = [rank for rank in order if order[rank] == min(order.values())]
        where = {rank: seen[rank].where for rank in behind if seen[rank].where}
        return Hang(min(order.values())[0], tuple(stopped or behind), where, stopped=bool(stopped))

    def _line(self) -> str:
        """The line of luffy, outside of this file, that the main thread is at."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(PACKAGE) and file != __file__:
                return f"{Path(file).relative_to(Path(PACKAGE).parent)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def device_index() -> int:
    """The index of the GPU that `join_world` takes."""
    return int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()


def pick_device(cfg: Config) -> str:
    """``cuda``, with this rank's GPU chosen, or ``cpu``; takes as many threads as the config says."""
    use_threads(cfg.train.threads)
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
