"""The lines of a dry run on engine, step, update, memory, time and disk."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from typing import Any

from luffy.config import Config
from luffy.dry_run.memory import Estimate, Parts, Work, moment_bytes
from luffy.dry_run.place import Place, engine_slots
from luffy.dry_run.times import time_line
from luffy.learn.optim import lr_at
from luffy.run_folder.checkpoint import files_below
from luffy.train.build_engines import context_of, transfer_of
from luffy.types import Episode, Task


def plan_line(cfg: Config, batch: list[Task], plan: list[tuple[Episode, ...]] | None) -> str:
    """Problems, samples and tokens of a step."""
    if plan is None:
        tokens = sum(len(t.prompt_ids) + max(len(d.token_ids) for d in t.demonstrations) for t in batch)
        return f"{len(batch)} traces, up to {tokens:,} tokens"
    planned = [p for group in plan for p in group]
    whole = sum(p.request is None for p in planned)
    partial = sum(p.request is not None and p.prefix > 0 for p in planned)
    own = len(planned) - whole - partial
    longest = sum(len(r.prompt_ids) + r.sampling.max_tokens for r in (p.request for p in planned) if r is not None)
    gate = cfg.guidance.gate
    further = "" if gate == "none" else f"; rounds of the gate {gate} come on top and are not counted"
    experts = cfg.batch.experts
    alone = f" and {experts} with a trace alone" if experts else ""
    return (
        f"{len(batch) - experts} problems x {cfg.rollout.n} samples{alone}: {own} on-policy, {partial} from a trace "
        f"prefix, {whole} whole traces; at most {longest:,} tokens through the engine{further}"
    )


def engine_line(cfg: Config, method: str, model_config: Any, on_gpu: bool) -> str:
    """The engine, its slots, and the correction of its mismatch."""
    r, e, slots = cfg.rollout, cfg.environment, engine_slots(cfg, on_gpu)
    sized = f"{slots:,} slots" + (" (environment.at_once)" if e is not None and slots == e.at_once else "")
    if r.engine == "native" or method == "sft":
        return f"native, {sized}"
    corrected = f"mismatch correction {cfg.algorithm.mismatch_correction}"
    if r.engine != "vllm":
        return f"{r.engine}, {corrected}"
    where = f"{len(r.vllm.servers)} server(s)" if r.vllm.servers else "in this process"
    return f"vLLM, {where}, {sized}, {context_of(cfg, model_config)} tokens of context, {corrected}"


def update_line(cfg: Config, method: str, steps: int) -> str:
    """Optimizer steps, micro-batches, learning rates and loss."""
    a, b = cfg.algorithm, cfg.batch
    first, last = lr_at(0, steps, cfg.optim), lr_at(steps - 1, steps, cfg.optim)
    sft = method == "sft"
    rl = f"{a.advantage}, {a.off_policy_reshape.shown}, {a.loss_reduction}"
    weight = [f"weight {a.sft_weight.shown}"] * (a.sft_weight != "none")
    anchor = [f"anchor {a.sft_anchor}"] * (a.sft_anchor > 0)
    loss = ", ".join([a.sft_reshape.shown, *weight, *anchor, "token-mean"]) if sft else rl
    return f"{b.updates} optimizer step(s), micro-batches of {b.tokens:,} tokens, lr {first:.2e} -> {last:.2e}, {loss}"


def need_lines(found: Estimate, method: str, steps: int, trainings: int, price: float | None) -> list[str]:
    """Memory, time and disk space of ``trainings`` runs."""
    parts = checkpoint_parts(found.cfg, method, found.work)
    return [
        f"memory     {found.line()}",
        time_line(found, steps * trainings, price),
        f"disk       {disk_line(found.cfg, found.work, parts, steps, trainings, found.place)}",
    ]


# Settings that write less, the mildest first.
LESS = ({"keep_optimizer": 1}, {"keep_best": False}, {"keep": 1})


def checkpoint_parts(cfg: Config, method: str, work: Work) -> Parts:
    """Bytes of one checkpoint: the model with its adapters merged, and the state that a resume needs."""
    masters = work.itemsize == 2 and (cfg.model.lora is None or cfg.launch != "local")
    averaged = method == "rl" and cfg.teacher.average > 0
    adapters = 0 if cfg.model.lora is None else 4 * work.trained
    return {
        "model": float(work.parameters * work.itemsize + adapters),
        "optimizer state": float(work.trained * (moment_bytes(cfg, method) + 4 * masters + 4 * averaged)),
    }


def checkpoints_at_once(cfg: Config, steps: int) -> tuple[int, int]:
    """The number of checkpoints while one is written, and when the run is done."""
    t, every = cfg.train, cfg.eval.every
    evaluated = t.keep_best and cfg.data.eval is not None and every > 0
    saved = min(steps, math.ceil(steps / t.save_every) + (math.ceil(steps / every) if evaluated else 0))
    kept = min(saved, t.keep + evaluated)
    return min(saved, kept + 1), kept


def bytes_of_run(cfg: Config, steps: int, parts: Parts) -> tuple[float, float]:
    """Bytes while a checkpoint is written, at most, and when the run is done."""
    model, state = parts["model"], parts["optimizer state"]
    writing, kept = checkpoints_at_once(cfg, steps)
    resumable = cfg.train.keep_optimizer or kept
    states = min(writing, min(kept, resumable) + 1), min(kept, resumable)
    return writing * model + states[0] * state, kept * model + states[1] * state


def disk_line(cfg: Config, work: Work, parts: Parts, steps: int, trainings: int, place: Place) -> str:
    """The bytes that ``trainings`` like this one write, one after the other, against the free space of their disk."""
    peak, end = bytes_of_run(cfg, steps, parts)
    for_engine = _pushed_by_folder(cfg, place) * work.parameters * work.itemsize
    before = (trainings - 1) * end + for_engine
    writing, _ = checkpoints_at_once(cfg, steps)
    each = ", ".join(f"{name} {size_of(size)}" for name, size in parts.items())
    there = sum(path.stat().st_size for path in files_below(cfg.folder / "checkpoints"))
    disk = next(path for path in (cfg.folder.absolute(), *cfg.folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(disk).free
    used = f" and {size_of(there)} of this run's checkpoints" if there else ""
    short = ""
    if before + peak > free + there:
        short = f": TOO LITTLE; {_advice(cfg, steps, parts, free + there - before)}"
    several = f" of {trainings} runs" if trainings > 1 else ""
    return (
        f"up to {size_of(before + peak)}{several}, {size_of(before + end)} at the end: {writing} checkpoints at once, "
        f"one being written ({each} each); the disk of {disk} has {size_of(free)} free{used}{short}"
    )


def _pushed_by_folder(cfg: Config, place: Place) -> bool:
    """Whether weights get to vLLM through the run's folder."""
    if cfg.rollout.engine != "vllm" or cfg.rollout.vllm.shared_folder is not None:
        return False
    return transfer_of(cfg, "cuda" if place.on_gpu else "cpu") == "folder"


def _advice(cfg: Config, steps: int, parts: Parts, room: float) -> str:
    """Settings that write less, one after the other until a run fits into ``room`` bytes."""
    said: list[str] = []
    most = bytes_of_run(cfg, steps, parts)[0]
    for changes in LESS:
        cfg = replace(cfg, train=replace(cfg.train, **changes))
        peak = bytes_of_run(cfg, steps, parts)[0]
        if peak < most:
            ((name, value),) = changes.items()
            said.append(f"train.{name}={str(value).lower()} ({size_of(peak)})")
            most = peak
        if peak <= room:
            break
    less = f"to write less, set {', then '.join(said)}; or " if said else ""
    return f"{less}set out= to a larger disk"


def size_of(size: float) -> str:
    """Bytes in words: decimal units, as disks are sold."""
    unit, name = (1e9, "GB") if size >= 1e8 else (1e6, "MB")
    return f"{size / unit:,.1f} {name}"
