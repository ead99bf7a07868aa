"""The checks in their order: measured on one rank, judged from the values of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from luffy.doctor import machine, network, numerics, storage
from luffy.doctor.findings import Cluster, Facts, Line
from luffy.doctor.ranks import Check, Context
from luffy.doctor.watch import Board, Hang
from luffy.errors import UserError

CHECKS = (
    Check("processes", machine.measure_identity, machine.judge_identity, together=True),
    Check("versions", machine.measure_versions, machine.judge_versions),
    Check("devices", machine.measure_devices, machine.judge_devices),
    Check("memory", machine.measure_memory, machine.judge_memory),
    Check("disk", storage.measure_storage, storage.judge_storage,
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
