"""How many CPU threads torch takes, and how many processes verify, by the cores that there are."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
MOST_WORKERS = 8


def use_threads(wanted: int | None) -> None:
    """``wanted`` threads. With none named here or in OMP_NUM_THREADS, torch's own choice, but no more than the cores
    this process may use: torch looks at the machine, not at a container's share of it, and threads that wait for a
    core cost several times what they bring."""
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ and available_cores() < torch.get_num_threads():
        torch.set_num_threads(available_cores())


def available_cores() -> int:
    """The cores this process is bound to, or fewer where its container has a quota of their time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(bound, _quota())))


def default_workers(device: str, processes: int = 1) -> int:
    """Verifier processes of each of the ``processes`` on this machine. Beside a GPU half of the cores: an engine that
    makes hundreds of responses a second waits for two of them."""
    return max(2, min(available_cores() // (2 * processes), MOST_WORKERS)) if device == "cuda" else 2


def _quota() -> float:
    """Cores' worth of time the container may use, by either version of Linux' control groups."""
    try:
        words = (CGROUP / "cpu.max").read_text().split()
    except OSError:
        words = [_content(CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    limited = len(words) == 2 and words[0].isdigit() and words[1].isdigit()  # "max", "-1" and nothing: no limit
    return int(words[0]) / int(words[1]) if limited else math.inf


def _content(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
