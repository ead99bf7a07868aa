"""``luffy doctor``: all checks, in one process or on every rank of a launch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TextIO

from rich.console import Console

from luffy._version import __version__
from luffy.config import Config
from luffy.distributed.launch import OnStep, launch
from luffy.distributed.world import leave_world
from luffy.doctor.checks import CHECKS, Found, gathered, hang_line, measure_all
from luffy.doctor.findings import Cluster, Report
from luffy.doctor.ranks import Context, pick_device
from luffy.doctor.watch import Board, Hang, Watch, open_boards, own_boards
from luffy.errors import TrainingStopped
from luffy.models.machine import use_threads
from luffy.progress import lasting

MARK = "luffy-doctor-report "  # begins the line that carries a report from a Ray worker to the command
ACKNOWLEDGE_S = 5.0


@dataclass(frozen=True)
class Examination:
    """The options of ``luffy doctor``, sent to the workers as they are. ``limit_s``: the longest a check may take."""

    cfg: Config
    limit_s: float = 60.0
    as_json: bool = False
    anonymous: bool = False

    def alone(self) -> None:
        """Examine in a single process."""
        self._examine(own_boards(), 0, 1, self._show, None)

    def as_worker(self, on_step: OnStep | None = None, out: TextIO | None = None) -> None:
        """Examine as one of several processes; with ``out`` (Ray) the report goes there as one line."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        deliver = self._show if out is None else lambda report: _send(report, out)
        try:
            self._examine(open_boards(rank, self.limit_s), rank, size, deliver, out)
        finally:
            if out is None:  # Ray ends what it began
                leave_world()

    def again(self) -> Examination:
        """The same examination: there is nothing to resume."""
        return self

    def _examine(
        self, boards: tuple[Board, Board], rank: int, size: int, deliver: Callable[[Report], None], out: TextIO | None
    ) -> None:
        """Measure, and report on rank 0; raises SystemExit with code 1 on every rank if a check failed."""
        use_threads(self.cfg.train.threads)
        started = time.perf_counter()

        def report_on(hang: Hang | None) -> None:
            board = boards[1 if hang else 0]
            found = gathered(board, size, hang, self.limit_s) if not (hang and hang.no_store) else without(hang)
            report = Report(__version__, self.cfg.launch, *found, time.perf_counter() - started)
            deliver(report)
            if not (hang and hang.no_store):
                board.put("verdict", report.passed)

        def without(hang: Hang) -> Found:
            cluster = Cluster(context.hosts or ["?"] * size)
            return cluster, [hang_line(CHECKS[hang.check], cluster, hang, self.limit_s)], {}, []

        end = os._exit if out is None else lambda code: None  # the command of Ray ends its workers
        watch = Watch(boards[1], rank, size, self.limit_s, report_on, end)
        context = Context(self.cfg, rank, size, pick_device(self.cfg), boards[0], watch, self.limit_s)
        watch.start()
        failed = measure_all(context, self._progress(rank, out))
        watch.leave(failed)
        boards[0].put(f"left/{rank}", True)
        if rank == 0:
            for other in range(size):
                boards[0].wait(f"left/{other}")
            report_on(None)
        passed = boards[0].wait("verdict")
        watch.stop()
        _acknowledge(boards[0], rank, size)
        if failed and out is None:
            sys.stdout.flush()
            os._exit(1)  # after an error NCCL may wait for the other ranks for ever when it is closed
        if not passed and out is None:
            sys.exit(1)

    def _progress(self, rank: int, out: TextIO | None) -> Callable[[str], Any]:
        """Show the current check: on a terminal, or to the command of Ray."""
        if rank != 0:
            return nullcontext
        if out is not None:
            return lambda name: nullcontext(out.write(f"doctor: {name}\n"))
        console = Console(file=lasting(sys.stderr))
        return (lambda name: console.status(f"doctor: {name}")) if console.is_terminal else nullcontext

    def _show(self, report: Report) -> None:
        report = report.anonymous() if self.anonymous else report
        console = Console(file=lasting(sys.stdout))
        if self.as_json:
            print(json.dumps(report.as_json(), indent=1, ensure_ascii=False), file=lasting(sys.stdout), flush=True)
            return
        if not console.is_terminal:
            console.width = 160  # in a file a line may be longer than a terminal's usual 80 characters
        console.print(report.table())
        sys.stdout.flush()


def examine(job: Examination, arguments: list[str]) -> None:
    """Run the examination as its config says; raises SystemExit with code 1 if a check failed."""
    if job.cfg.launch != "ray":
        launch(job, arguments, "run luffy doctor again")
        return
    from luffy.distributed.ray_launch import print_lines, run_on_ray

    reports: list[Report] = []
    heard: list[float] = []

    def show(lines: list[str]) -> bool:
        now = time.monotonic()
        heard.extend([now] * len(lines))
        if heard and now - heard[-1] > 2 * job.limit_s:
            raise TrainingStopped(f"rank 0 said nothing for {2 * job.limit_s:g} s; look at its machine and Ray's logs")
        reports.extend(_received(line) for line in lines if line.startswith(MARK))
        return print_lines([line for line in lines if not line.startswith(MARK)]) or bool(reports)

    ray = replace(job.cfg.ray, max_failures=0)  # a worker that is lost is a finding
    run_on_ray(replace(job, cfg=replace(job.cfg, ray=ray)), show)
    if not reports:
        raise TrainingStopped("the workers ended without a report; look at Ray's logs of them")
    job._show(reports[0])
    if not reports[0].passed:
        sys.exit(1)


def _acknowledge(board: Board, rank: int, size: int) -> None:
    """Rank 0 may keep the store that the others read the verdict from: it waits until they have."""
    if rank != 0:
        board.put(f"done/{rank}", True)
        return
    until = time.monotonic() + ACKNOWLEDGE_S
    for other in range(1, size):
        while board.get(f"done/{other}") is None and time.monotonic() < until:
            time.sleep(0.05)


def _send(report: Report, out: TextIO) -> None:
    content = {**report.as_json(), "private": list(report.private)}
    out.write(f"{MARK}{json.dumps(content)}\n")


def _received(line: str) -> Report:
    content = json.loads(line.removeprefix(MARK))
    return Report.from_json(content, content["private"])
