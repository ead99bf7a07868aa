"""Where the time of a piece of work goes, kernel by kernel (on a CPU: operator by operator)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile


def top_kernels(work: Callable[[], object], device: torch.device, count: int = 12) -> list[dict[str, Any]]:
    """The kernels that take longest, each with its share of the time of all."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in profiled(work, device):
        name = event.name.removeprefix("void ")
        seconds[name] += _seconds(event, device)
        calls[name] += 1
    longest = sorted(seconds, key=lambda name: -seconds[name])[:count]
    whole = sum(seconds.values())
    return [
        {"kernel": name, "calls": calls[name], "seconds": seconds[name], "share": seconds[name] / whole}
        for name in longest
    ]


def profiled(work: Callable[[], object], device: torch.device) -> list[FunctionEvent]:
    """What ran on the device meanwhile. Named regions are no work of their own: they span that of others."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    events: list[FunctionEvent] = profiler.events() or []
    return [e for e in events if (e.device_type.name == "CUDA") == on_gpu and not e.is_user_annotation]


def _seconds(event: FunctionEvent, device: torch.device) -> float:
    """On a CPU operators call each other, and each counts without those it called."""
    micros = event.time_range.elapsed_us() if device.type == "cuda" else event.self_cpu_time_total
    return float(micros) / 1e6
