"""The checks in their order, on one process or on every rank of a launch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TextIO

import torch
from rich.console import Console

from luffy._version import __version__
from luffy.config import Config
from luffy.distributed.launch import OnStep, launch
from luffy.distributed.world import leave_world
from luffy.doctor import machine, network, numerics, storage
from luffy.doctor.board import Board, open_boards, own_boards
from luffy.doctor.context import Check, Context
from luffy.doctor.findings import Cluster, Facts, Line, Report
from luffy.doctor.watch import Hang, Watch
from luffy.errors import TrainingStopped, UserError
from luffy.models.threads import use_threads
from luffy.progress import lasting

CHECKS = (
    Check("processes", machine.measure_identity, machine.judge_identity, together=True),
    Check("versions", machine.measure_versions, machine.judge_versions),
    Check("devices", machine.measure_devices, machine.judge_devices),
    Check("memory", machine.measure_memory, machine.judge_memory),
    Check("disk", storage.measure_storage, storage.judge_storage),
    Check("ports", network.measure_ports, network.judge_ports),
    Check("speed", machine.measure_speed, machine.judge_speed),
    Check("connection", network.measure_connection, network.judge_connection, together=True),
    Check("bandwidth", network.measure_bandwidth, network.judge_bandwidth, together=True),
    Check("gradient", numerics.measure_gradient, numerics.judge_gradient, together=True),
    Check("engine", numerics.measure_engine, numerics.judge_engine, together=True),
)
# What a broken machine makes a check raise; anything else is a defect of luffy and keeps its traceback.
FAULTS = (RuntimeError, OSError, UserError, MemoryError)
NOT_APPLICABLE = {
    "connection": "one process: there is nothing to connect",
    "bandwidth": "one process: there is nothing to exchange",
    "gradient": "one process on a CPU: there is nothing to compare with",
}
MARK = "luffy-doctor-report "  # begins the line that carries a report from a Ray worker to the command
ACKNOWLEDGE_S = 5.0


@dataclass(frozen=True)
class Examination:
    """What ``luffy doctor`` was asked to do; it travels to the workers as it is. ``limit_s``: the longest that a check
    may take."""

    cfg: Config
    limit_s: float = 60.0
    as_json: bool = False
    anonymous: bool = False

    def alone(self) -> None:
        self._examine(own_boards(), 0, 1, self._show, None)

    def as_worker(self, on_step: OnStep | None = None, out: TextIO | None = None) -> None:
        """In one of several processes that a launcher started; with ``out`` (Ray) the report goes there as one line."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        deliver = self._show if out is None else lambda report: _send(report, out)
        try:
            self._examine(open_boards(rank, self.limit_s), rank, size, deliver, out)
        finally:
            if out is None:  # Ray ends what it began
                leave_world()

    def again(self) -> Examination:
        return self

    def _examine(
        self, boards: tuple[Board, Board], rank: int, size: int, deliver: Callable[[Report], None], out: TextIO | None
    ) -> None:
        """Measure, and report on rank 0; raises SystemExit with code 1 on every rank where a check failed."""
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
            return cluster, [_hang_line(CHECKS[hang.check], cluster, hang, self.limit_s)], {}, []

        end = os._exit if out is None else lambda code: None  # the command of Ray ends its workers
        watch = Watch(boards[1], rank, size, self.limit_s, report_on, end)
        on_gpu = self.cfg.model.device != "cpu" and torch.cuda.is_available()
        context = Context(self.cfg, rank, size, "cuda" if on_gpu else "cpu", boards[0], watch, self.limit_s)
        if on_gpu:
            torch.cuda.set_device(machine.device_index())
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
        """Shows which check runs: on a terminal, or to the command of Ray."""
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
    """Run the examination as its config says; raises SystemExit with code 1 where a check failed."""
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


def measure_all(context: Context, progress: Callable[[str], Any]) -> bool:
    """Run every check on this rank and publish what it measured. True where one failed in a way that leaves the ranks
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
    hosts = [board.get(f"host/{rank}") or "?" for rank in range(size)]
    cluster, lines = Cluster(hosts), []
    facts: dict[str, Facts] = {}
    for number, check in enumerate(CHECKS):
        values = {rank: fact["value"] for rank, fact in published[check.name].items() if fact.get("value") is not None}
        errors = {rank: fact["error"] for rank, fact in published[check.name].items() if "error" in fact}
        facts[check.name] = values
        lines += _error_lines(check, cluster, errors)
        if hang is not None and hang.check == number and not hang.failed:
            lines.append(_hang_line(check, cluster, hang, limit_s))
        elif values and (hang is None or len(published[check.name]) == size):
            lines += check.judge(cluster, values)
        elif not errors and len(published[check.name]) == size:
            lines.append(Line(check.name, "skipped", NOT_APPLICABLE.get(check.name, "does not apply")))
        elif not errors:
            lines.append(Line(check.name, "skipped", "not reached"))
    private = {word for value in facts["processes"].values() for word in value.pop("private")}
    return cluster, lines, facts, sorted(private)


def _error_lines(check: Check, cluster: Cluster, errors: Mapping[int, str]) -> list[Line]:
    """A line for each different error, with the ranks that had it."""
    lines = []
    for text in dict.fromkeys(errors.values()):
        ranks = [rank for rank, error in errors.items() if error == text]
        where = f"{cluster.name(ranks)}: " if len(cluster.hosts) > 1 else ""
        lines.append(Line(check.name, "failed", f"{where}{text}", REMEDIES.get(check.name, REMEDY)))
    return lines


REMEDY = "see the message; set NCCL_DEBUG=INFO for more, and run again on this machine alone (launch=local)"
REMEDIES = {
    "disk": "set out=FOLDER to a folder that can be written to",
    "connection": "check MASTER_ADDR, NCCL_SOCKET_IFNAME and the firewall; NCCL_DEBUG=INFO shows more",
    "speed": "free the GPU (nvidia-smi), or reset it",
}


def _hang_line(check: Check, cluster: Cluster, hang: Hang, limit_s: float) -> Line:
    where = ", ".join(f"rank {rank} at {line}" for rank, line in hang.where.items())
    where = f" ({where})" if where else ""
    if len(hang.ranks) == len(cluster.hosts) > 1:
        text = f"no rank went on for {limit_s:g} s{where}"
        fix = "the exchange itself hangs: check NCCL_SOCKET_IFNAME and the firewall, and set NCCL_DEBUG=INFO"
        return Line(check.name, "failed", text, fix)
    what = "does not answer any more" if hang.stopped else f"did not go on for {limit_s:g} s"
    fix = "look at this machine (dmesg, nvidia-smi, its disks), leave it out, or raise --timeout if it is only slow"
    return Line(check.name, "failed", f"{cluster.name(hang.ranks)} {what}{where}", fix)


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
