"""The disk of the run folder: space, speed, and whether all machines see the same one."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from luffy.doctor.findings import Cluster, Facts, Line, judged
from luffy.doctor.ranks import Context

CHUNK = 1 << 24
MOST_BYTES = 1 << 28
MOST_S = 5.0  # of writing; flushing what is written comes on top
LITTLE_SPACE, NO_SPACE = 20e9, 1e9  # bytes
SLOW_DISK = 50e6  # bytes a second
PATIENCE_S = 10.0  # until a file that another machine wrote shows: network file systems remember what was absent


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: the doctor makes no run folder."""
    folder = folder.resolve()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def measure_storage(context: Context) -> dict[str, Any] | None:
    """Free space and speed, by one rank of each machine. The main rank leaves a mark that the others look for."""
    if context.rank not in context.leaders:
        return None
    folder = existing(context.cfg.folder)
    mark = folder / f".luffy-doctor-{secrets.token_hex(8)}"
    facts: dict[str, Any] = {"folder": str(folder), "free": shutil.disk_usage(folder).free, "speed": None}
    try:
        facts["speed"] = write_speed(mark)
        if len(set(context.hosts)) > 1:
            facts["shared"] = _sees_mark(context, mark)
    finally:
        mark.unlink(missing_ok=True)
    return facts


def write_speed(file: Path) -> float:
    """Bytes a second, flushed to the disk."""
    chunk = os.urandom(CHUNK)
    started, written = time.perf_counter(), 0
    with file.open("wb", buffering=0) as out:
        while written < MOST_BYTES and time.perf_counter() - started < MOST_S:
            written += out.write(chunk)
        os.fsync(out.fileno())
    return written / (time.perf_counter() - started)


def _sees_mark(context: Context, mark: Path) -> bool:
    """Whether this machine sees the main rank's file; the main rank waits until all have looked."""
    if context.rank == 0:
        context.board.put("mark", mark.name)
        context.watch.meet()
        for leader in context.leaders[1:]:
            context.board.wait(f"looked/{leader}")
        return True
    context.watch.meet()
    theirs = mark.with_name(context.board.wait("mark"))
    until = time.monotonic() + min(PATIENCE_S, context.limit_s / 2)
    while not (there := theirs.exists()) and time.monotonic() < until:
        time.sleep(0.2)
        os.listdir(theirs.parent)  # makes NFS look again
    context.board.put(f"looked/{context.rank}", True)
    return there


def judge_storage(cluster: Cluster, facts: Facts) -> list[Line]:
    """Judge the least free space, the slowest disk, and whether all machines see one run folder."""
    least, slowest = (min(facts, key=lambda rank, key=key: facts[rank][key]) for key in ("free", "speed"))  # type: ignore[misc]
    free, speed = facts[least]["free"], facts[slowest]["speed"]
    found = f"{free / 1e9:.1f} GB free, {speed / 1e6:.0f} MB/s written in {facts[least]['folder']}"
    found += f" ({cluster.name([least])})" if len(facts) > 1 else ""
    larger = "set out=FOLDER on a larger disk: a checkpoint takes about 16 bytes a weight, and train.keep + 1 are kept"
    lines = [
        judged(
            "disk",
            found,
            (free < NO_SPACE, "failed", "", "free some space, or set out=FOLDER on another disk"),
            (free < LITTLE_SPACE, "warning", "", larger),
            (speed < SLOW_DISK, "warning", "", "set out=FOLDER on a faster disk, or save seldom (train.save_every)"),
        )
    ]
    blind = [rank for rank, fact in facts.items() if fact.get("shared") is False]
    if blind:
        text = f"{cluster.name(blind)}: the run folder is not the one of {cluster.hosts[0]}"
        lines.append(Line("disk", "failed", text, "set out=FOLDER on storage that every machine sees at the same path"))
    elif len(cluster.machines) > 1:
        lines.append(Line("disk", "ok", "every machine sees the same run folder"))
    return lines
