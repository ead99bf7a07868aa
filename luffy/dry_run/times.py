"""How long a step will take, and what a run on GPUs will cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from luffy.config import Config
from luffy.dry_run.gpu_cost import TIMED_ENGINES, StepTime, gpu_named, times_on_gpus
from luffy.dry_run.memory_model import Work
from luffy.dry_run.memory_needs import slots_of
from luffy.dry_run.place import Place
from luffy.dry_run.probe import this_gpu, time_on_cpu
from luffy.models.load import slow_dtype
from luffy.types import Request


def time_line(
    cfg: Config, work: Work, requests: Sequence[Request], steps: int, place: Place, price: float | None
) -> str:
    """Of a step and of all ``steps``: on a CPU by a trial, on GPUs with their cost by the cost model."""
    if place.on_gpu:
        return f"cost       {gpu_line(cfg, work, requests, steps, place, price)}"
    return f"time       {cpu_line(cfg, work, requests, steps)}"


def gpu_line(
    cfg: Config, work: Work, requests: Sequence[Request], steps: int, place: Place, price: float | None
) -> str:
    """The same run with short responses and with all of full length."""
    gpu = gpu_named(place.rented) if place.rented else this_gpu()
    gpus = cfg.parallel.workers
    name = f"{gpus} x {place.rented.upper() if place.rented else 'GPU of this machine'}"
    found = times_on_gpus(cfg, work, requests, gpu)
    if not found:
        return f"not estimated: the run does not fit on {name}"
    parts = parts_of(cfg, requests, cfg.rollout.engine in TIMED_ENGINES, found)
    hours = [t.step * steps * gpus / 3600 for t in found]
    paid = "" if price is None else f", {_span(_rounded(h * price) for h in hours)} at {price:g} an hour"
    lengths = " (responses of a quarter of rollout.max_tokens in the mean, and of full length)" if requests else ""
    return (
        f"on {name}: {_span(duration(t.step) for t in found)} a step ({parts}), "
        f"{_span(duration(t.step * steps) for t in found)} for {steps} steps, {_span(map(_rounded, hours))} GPU "
        f"hours{paid}{lengths}, without rewards, evaluations and checkpoints; by the cost model with "
        f"{gpu.flops / 1e12:.0f} TFLOP/s and {gpu.memory_bandwidth / 1e12:.1f} TB/s (docs/results/cost.md says how it "
        "was checked)"
    )


def parts_of(cfg: Config, requests: Sequence[Request], timed: bool, found: Sequence[StepTime]) -> str:
    """What a step's time is made of; ``timed``: whether rollouts are in it, where there are any."""
    if requests and timed:
        return f"rollout {_span(duration(t.rollout) for t in found)}, update {_span(duration(t.update) for t in found)}"
    return "update alone" + (f": how long rollouts of {cfg.rollout.engine} take is not known" if requests else "")


def _span(texts: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(texts))


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 9.5 else f"{number:.2g}"


def cpu_line(cfg: Config, work: Work, requests: Sequence[Request], steps: int) -> str:
    """Every response as long as it may become."""
    if slow_dtype(cfg.model.dtype, "cpu"):
        return f"not tried in {cfg.model.dtype}, which is slow on this CPU"
    rolled_out = requests if cfg.rollout.engine == "native" else []
    found = time_on_cpu(cfg, work, rolled_out, slots_of(cfg, work, requests))
    if found is None:
        return "not estimated: the model cannot be tried on this machine with fewer layers"
    parts = parts_of(cfg, requests, cfg.rollout.engine == "native", [found])
    layers = "one layer" if work.config.num_hidden_layers == 1 else "two layers"
    return (
        f"roughly {duration(found.step)} a step ({parts}), {duration(steps * found.step)} for {steps} steps, without "
        f"rewards, evaluations and checkpoints; tried with {layers} of the model on this machine, responses of full "
        f"length"
    )


def duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 9.5 else f"{seconds:.0f} s"
