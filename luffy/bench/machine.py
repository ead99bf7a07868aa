"""What the machine can do, measured on the spot: the yardsticks of every share in a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    name: str
    flops: float  # matrix product in the dtype at hand, per second
    bandwidth: float  # bytes read or written by a copy, per second

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Machine:
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
    """The fastest of several runs, after one that warms up."""
    work()
    return min(timed(work, device) for _ in range(repeats))


def timed(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Largest memory held by tensors since `reset_peak`; nobody counts it on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
