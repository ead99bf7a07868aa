"""Memory of a machine and of a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def unused_bytes(device: torch.device) -> int:
    """Memory nobody holds: the driver's, and what torch has reserved but not given out."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not say."""
    return _kilobytes(Path("/proc/self/status"), "VmRSS") or 0


def memory_of_machine(gpu: bool) -> tuple[int, int, str]:
    """Bytes that are free, bytes in all, and whose they are. A container may have less than its machine."""
    if gpu:
        return *torch.cuda.mem_get_info(), torch.cuda.get_device_name()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _kilobytes(Path("/proc/meminfo"), "MemAvailable") or total
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and limit < total:
        return min(free, limit - (used or 0)), limit, "this container"
    return free, total, "this machine"


def _kilobytes(path: Path, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE) if path.exists() else None
    return 1024 * int(found[1]) if found else None


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None
