"""Memory, cores and speed of the machine."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from luffy.errors import ConfigError

CGROUP = Path("/sys/fs/cgroup")
MOST_WORKERS = 8


def unused_bytes(device: torch.device) -> int:
    """GPU memory that torch may still allocate: the driver's, within this process's limit, and what torch has reserved
    but not allocated."""
    free, total = torch.cuda.mem_get_info(device)
    reserved, limit = torch.cuda.memory_reserved(device), torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free, int(limit) - reserved) + reserved - torch.cuda.memory_allocated(device)


def resident_bytes() -> int:
    """Memory of this process now; 0 if the system does not tell."""
    return _kilobytes(Path("/proc/self/status"), "VmRSS") or 0


def memory_of_machine(gpu: bool) -> tuple[int, int, str]:
    """Free bytes, total bytes, and the name of their owner; a container may have less than its machine."""
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
    text = _content(path)
    return int(text) if text.isdigit() else None


def use_threads(wanted: int | None) -> None:
    """Set torch's CPU threads. Without ``wanted`` or OMP_NUM_THREADS it is torch's choice, but at most the cores this
    process may use: torch counts the machine's, not a container's, and threads that wait for a core are expensive."""
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ and available_cores() < torch.get_num_threads():
        torch.set_num_threads(available_cores())


def available_cores() -> int:
    """Cores this process is bound to, or fewer if its container has a quota of their time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(bound, _quota())))


def default_workers(device: str, processes: int = 1) -> int:
    """Verifier processes for each of the ``processes`` on this machine: 2, next to a GPU half of the cores, because an
    engine that makes hundreds of responses a second would wait for two."""
    return max(2, min(available_cores() // (2 * processes), MOST_WORKERS)) if device == "cuda" else 2


def _quota() -> float:
    """Cores that the container's time quota allows, in either version of Linux control groups."""
    words = _content(CGROUP / "cpu.max").split()
    words = words or [_content(CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    limited = len(words) == 2 and words[0].isdigit() and words[1].isdigit()  # "max", "-1" and nothing: no limit
    return int(words[0]) / int(words[1]) if limited else math.inf


def _content(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Machine:
    """Measured limits of a device."""

    name: str
    flops: float  # matrix product in the dtype at hand, per second
    bandwidth: float  # bytes read or written by a copy, per second

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Machine:
        """Time a matrix product in ``dtype`` and a copy on ``device``."""
        size, copied = (8192, 1 << 30) if device.type == "cuda" else (1024, 1 << 26)
        a = torch.randn(size, size, device=device).to(dtype)
        product = best_seconds(lambda: a @ a, device)
        source = torch.zeros(copied, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        copy = best_seconds(lambda: target.copy_(source), device)
        cpu = f"CPU, {torch.get_num_threads()} threads"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        return cls(name, 2 * size**3 / product, 2 * copied / copy)


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Seconds of the fastest of several runs, after one that warms up."""
    work()
    return min(timed(work, device) for _ in range(repeats))


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, kernels included."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for the kernels of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pick_device(wanted: str) -> str:
    """The device that ``model.device`` names: cpu or cuda; auto is cuda if torch sees a GPU."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {wanted!r} is unknown: use auto, cpu or cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("'model.device' is cuda but torch sees no GPU; set model.device=cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"
