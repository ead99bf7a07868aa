"""The memory that a step of this run will need, by the memory model (`luffy.dry_run.memory_model`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from luffy.config import Config
from luffy.dry_run.bare_models import OtherModels, parameters_of
from luffy.dry_run.cost import Gpu
from luffy.dry_run.gpu_cost import TIMED_ENGINES
from luffy.dry_run.memory_model import ALLOCATOR, Parts, Work, rollout_parts, update_parts
from luffy.dry_run.place import Place
from luffy.models.forward import text_config
from luffy.models.load import DTYPES
from luffy.models.memory import resident_bytes
from luffy.rollout.native import default_slots
from luffy.train.run_state import Method
from luffy.train.vllm_settings import VLLM_SLOTS
from luffy.types import Request

GIB = 2**30
SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
LOADED_LATER = GIB // 10  # libraries and scratch memory that only a training touches, on a CPU


def shards_of(cfg: Config) -> int:
    """Processes that share one copy of the weights; hybrid, those of a machine as large as the cost model's."""
    p = cfg.parallel
    if cfg.launch == "local":
        return 1
    return p.shard_size or (min(p.workers, Gpu.per_machine) if p.shard == "hybrid" else p.workers)


def kept_parts(cfg: Config, method: Method, work: Work, others: OtherModels) -> Parts:
    """What stays in memory from step to step."""
    local, shards, size = cfg.launch == "local", shards_of(cfg), work.itemsize
    master = 4 if size == 2 and cfg.model.lora is None and local else 0
    moments = 16 if method == "rl" and cfg.sft_steps.buffer else 8  # SFT steps have an optimizer of their own
    parts = {
        "runtime": 0.0 if work.on_gpu else float(resident_bytes() + LOADED_LATER),
        "weights": work.parameters * (size if local else 4) / shards,  # sharded weights are the masters
        "optimizer": 0.0 if cfg.optim.offload and work.on_gpu else work.trained * (moments + master) / shards,
    }
    lags = method == "rl" and cfg.async_.max_staleness > 0
    if method == "rl" and cfg.loads_reference:
        parts["reference"] = work.parameters * size / shards
    if not local or lags:
        parts["copies for rollouts"] = float(work.parameters * size * (2 if lags else 1))
    if others.second is not None:
        parts["second model"] = float(parameters_of(others.second) * second_itemsize(cfg))
    if method == "rl":
        parts["teacher"] = teacher_bytes(cfg, work, others.teacher) / shards
        parts["fp8 copy"] = float(work.parameters) if cfg.rollout.precision == "fp8" else 0.0
    return {name: size for name, size in parts.items() if size}


def second_itemsize(cfg: Config) -> int:
    """Bytes of a weight of the model that overrides tokens."""
    knobs = cfg.rollout.overrides
    return SIZES[(knobs and knobs.dtype) or cfg.model.dtype]


def teacher_bytes(cfg: Config, work: Work, model: Any) -> float:
    """Over all processes: a model of its own; of averaged weights those that are trained, in float32; of the policy of
    the start a copy, unless it is the policy without its adapters."""
    size = SIZES[cfg.teacher.dtype or cfg.model.dtype]
    if model is not None:
        return float(parameters_of(model) * size)
    if cfg.teacher.average:
        return float(work.trained * 4)
    return float(work.parameters * size) if cfg.teacher.is_self and cfg.model.lora is None else 0.0


def slots_of(cfg: Config, work: Work, requests: Sequence[Request]) -> int:
    most = VLLM_SLOTS if cfg.rollout.engine == "vllm" else default_slots("cuda" if work.on_gpu else "cpu")
    return min(cfg.rollout.slots or most, len(requests))


def memory_needs(
    cfg: Config, work: Work, requests: Sequence[Request], others: OtherModels, kept: Parts
) -> dict[str, Parts]:
    """Bytes of each phase by part. Where rollouts and updates take turns, each has its own beside what is ``kept``.
    What an engine of the user's own needs is not known."""
    gathered = cfg.parallel.gather == "mini_batch"  # auto gathers once only if there is room
    update = update_parts(replace(work, trained=work.trained // (1 if gathered else shards_of(cfg))))
    update |= {"gathered weights": float(work.parameters * work.itemsize)} if gathered else {}
    if not requests or cfg.rollout.engine not in TIMED_ENGINES:
        return {"update": kept | update}
    slots = slots_of(cfg, work, requests)
    longest = max(len(r.given_ids) + r.sampling.max_tokens for r in requests)
    prompts = [len(ids) for ids in {r.given_ids for r in requests}]
    rollout = rollout_parts(work, slots, prompts, longest, len(requests) // len(prompts))
    if others.second is not None:
        second = replace(work, config=text_config(others.second.config), itemsize=second_itemsize(cfg))
        beside = rollout_parts(second, slots, prompts, longest, 1)
        rollout["second KV cache"] = beside["KV cache"]
    if cfg.async_.max_staleness > 0:
        return {"update beside rollouts": kept | update | rollout}
    return {"update": kept | update, "rollout": kept | rollout}


def work_and_needs(
    cfg: Config, method: Method, work: Work, requests: Sequence[Request], others: OtherModels, place: Place
) -> tuple[Work, dict[str, Parts]]:
    """The work of an update in that place, with the memory that it leaves unused there, and the bytes of each phase."""
    kept = kept_parts(cfg, method, work, others)
    if place.on_gpu:
        work = replace(work, unused=place.free - sum(kept.values()) - work.trained * 4 / shards_of(cfg))
    return work, memory_needs(cfg, work, requests, others, kept)


def totals_of(needs: dict[str, Parts], on_gpu: bool) -> dict[str, float]:
    """Bytes of each phase."""
    return {phase: (ALLOCATOR if on_gpu else 1.0) * sum(parts.values()) for phase, parts in needs.items()}


def memory_line(cfg: Config, work: Work, requests: Sequence[Request], needs: dict[str, Parts], place: Place) -> str:
    """The phase that needs the most, part by part; the others as a sum; and what the place of the run has."""
    above = ALLOCATOR if work.on_gpu else 1.0
    totals = totals_of(needs, work.on_gpu)
    phase = max(totals, key=lambda name: totals[name])
    shown = ", ".join(f"{name} {above * size / GIB:.2f}" for name, size in needs[phase].items())
    others = "".join(f"; {name} {total / GIB:.2f} GiB" for name, total in totals.items() if name != phase)
    if requests and cfg.rollout.engine not in TIMED_ENGINES:
        others += f"; how much rollouts of {cfg.rollout.engine} need is not known"
    each = "" if cfg.launch == "local" else f" in each of {cfg.parallel.workers} processes"
    host = f"; {12 * work.trained / GIB:.1f} GiB of host memory for optim.offload" if cfg.optim.offload else ""
    free = "" if place.rented else f", {place.free / GIB:.1f} free"
    short = "" if totals[phase] <= place.free else ": TOO LITTLE (docs/troubleshooting.md, out of memory)"
    return (
        f"about {totals[phase] / GIB:.2f} GiB at the peak{each}, in the {phase}: {shown} GiB{others}{host}; "
        f"{place.name} has {place.total / GIB:.1f} GiB{free}{short}"
    )
