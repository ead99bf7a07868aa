"""``luffy doctor``: all checks, in one process or on every rank of a launch.

They are measured on every rank, and judged once from the values of all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from rich.console import Console

from luffy._version import __version__
from luffy.config import Config
from luffy.distributed.launch import OnStep, launch
from luffy.distributed.world import leave_world
from luffy.doctor import machine, network, numerics
from luffy.doctor.findings import Cluster, Facts, Line, Report
from luffy.doctor.watch import Board, Context, Hang, Watch, open_boards, own_boards, pick_device
from luffy.errors import TrainingStopped, UserError
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
        deliver = self._show if out is None else lambda report: out.write(f"{MARK}{json.dumps(asdict(report))}\n")
        try:
            self._examine(open_boards(rank, self.limit_s), rank, size, deliver, out)
        finally:
            if out is None:  # Ray ends what it began
                leave_world()

    def again(self) -> Examination:
        """The same examination: there is nothing to resume."""
        return self

    def _examine(
        self, boards: tuple[Board, Board], rank: int, size: int, deliver: Callable[[Report], object], out: TextIO | None
    ) -> None:
        """Measure, and report on rank 0; raises SystemExit with code 1 on every rank if a check failed."""
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
        sent = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
        reports.extend(map(Report.received, sent))
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


CHECKS = (
    Check("processes", machine.measure_identity, machine.judge_identity, together=True),
    Check("versions", machine.measure_versions, machine.judge_versions),
    Check("devices", machine.measure_devices, machine.judge_devices),
    Check("memory", machine.measure_memory, machine.judge_memory),
    Check("disk", machine.measure_storage, machine.judge_storage,
          remedy="set out=FOLDER to a folder that can be written to"),
    Check("ports", network.measure_ports, network.judge_ports),
    Check("speed", machine.measure_speed, machine.judge_speed, remedy="free the GPU (nvidia-smi), or reset it"),
    Check("connection", network.measure_connection, network.judge_connection, together=True,
          absent="one process: there is nothing to connect",
          remedy="check MASTER_ADDR, NCCL_SOCKET_IFNAME and the firewall; NCCL_DEBUG=INFO shows more"),
    Check("bandwidth", network.measure_bandwidth, network.judge_bandwidth, together=True,
          absent="one process: there is nothing to exchange"),
    Check("gradient", numerics.measure_gradient, numerics.judge_gradient, together=True,
          absent="one process on a CPU: there is nothing to compare with"),
    Check("engine", numerics.measure_engine, numerics.judge_engine, together=True),
)  # fmt: skip
# Errors that a broken machine makes a check raise; any other is a defect of luffy and keeps its traceback.
FAULTS = (RuntimeError, OSError, UserError, MemoryError)


def measure_all(context: Context, progress: Callable[[str], Any]) -> bool:
    """Run every check on this rank and publish what it measured. True if one failed in a way that leaves the ranks
    out of step, which ends the measuring."""
    for number, check in enumerate(CHECKS):
        context.watch.enter(number)
        with progress(check.name):
            try:
                fact = {"value": check.measure(context)}
            except FAULTS as error:
                fact = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        context.board.put(f"fact/{check.name}/{context.rank}", fact)
        if "error" in fact and check.together and context.size > 1:
            return True
    return False


Found = tuple[Cluster, list[Line], dict[str, Facts], list[str]]


def gathered(board: Board, size: int, hang: Hang | None, limit_s: float) -> Found:
    """The cluster, lines, facts and private words from what all ranks have published so far."""
    published = {
        check.name: {rank: fact for rank in range(size) if (fact := board.get(f"fact/{check.name}/{rank}")) is not None}
        for check in CHECKS
    }
    at = None if hang is None or hang.failed else _hanging_check(hang, published)
    hosts = [board.get(f"host/{rank}") or "?" for rank in range(size)]
    cluster, lines = Cluster(hosts), []
    facts: dict[str, Facts] = {}
    for number, check in enumerate(CHECKS):
        values = {rank: fact["value"] for rank, fact in published[check.name].items() if fact.get("value") is not None}
        errors = {rank: fact["error"] for rank, fact in published[check.name].items() if "error" in fact}
        facts[check.name] = values
        lines += _error_lines(check, cluster, errors)
        if hang is not None and at == number:
            lines.append(hang_line(check, cluster, hang, limit_s))
        elif values and (hang is None or len(published[check.name]) == size):
            lines += check.judge(cluster, values)
        elif not errors and len(published[check.name]) == size:
            lines.append(Line(check.name, "skipped", check.absent))
        elif not errors:
            lines.append(Line(check.name, "skipped", "not reached"))
    private = {word for value in facts["processes"].values() for word in value.pop("private")}
    return cluster, lines, facts, sorted(private)


def _hanging_check(hang: Hang, published: Mapping[str, Mapping[int, Any]]) -> int:
    """The number of the first check that a hanging rank has not finished: what it published last may be newer than
    its progress."""
    unfinished = (
        number
        for number, check in enumerate(CHECKS)
        if number >= hang.check and any(rank not in published[check.name] for rank in hang.ranks)
    )
    return next(unfinished, hang.check)


def _error_lines(check: Check, cluster: Cluster, errors: Mapping[int, str]) -> list[Line]:
    """A line for each different error, with the ranks that had it."""
    lines = []
    for text in dict.fromkeys(errors.values()):
        ranks = [rank for rank, error in errors.items() if error == text]
        where = f"{cluster.name(ranks)}: " if len(cluster.hosts) > 1 else ""
        lines.append(Line(check.name, "failed", f"{where}{text}", check.remedy))
    return lines


def hang_line(check: Check, cluster: Cluster, hang: Hang, limit_s: float) -> Line:
    where = ", ".join(f"rank {rank} at {line}" for rank, line in hang.where.items())
    where = f" ({where})" if where else ""
    if len(hang.ranks) == len(cluster.hosts) > 1:
        text = f"no rank went on for {limit_s:g} s{where}"
        fix = "the exchange itself hangs: check NCCL_SOCKET_IFNAME and the firewall, and set NCCL_DEBUG=INFO"
        return Line(check.name, "failed", text, fix)
    what = "does not answer any more" if hang.stopped else f"did not go on for {limit_s:g} s"
    fix = "look at this machine (dmesg, nvidia-smi, its disks), leave it out, or raise --timeout if it is only slow"
    return Line(check.name, "failed", f"{cluster.name(hang.ranks)} {what}{where}", fix)
