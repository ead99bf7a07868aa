"""The lines of a dry run on engine, step, update, memory, time and disk."""

from __future__ import annotations

from typing import Any

from luffy.config import Config
from luffy.dry_run.disk import checkpoint_parts, disk_line
from luffy.dry_run.memory import Estimate
from luffy.dry_run.place import engine_slots
from luffy.dry_run.times import time_line
from luffy.learn.optim import lr_at
from luffy.train.vllm_settings import context_of
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
    r, slots = cfg.rollout, engine_slots(cfg, on_gpu)
    if r.engine == "native" or method == "sft":
        return f"native, {slots:,} slots"
    corrected = f"mismatch correction {cfg.algorithm.mismatch_correction}"
    if r.engine != "vllm":
        return f"{r.engine}, {corrected}"
    where = f"{len(r.vllm.servers)} server(s)" if r.vllm.servers else "in this process"
    return f"vLLM, {where}, {slots} slots, {context_of(cfg, model_config)} tokens of context, {corrected}"


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
    cfg, work, place = found.cfg, found.work, found.place
    return [
        f"memory     {found.line()}",
        time_line(cfg, work, found.requests, steps * trainings, place, price),
        f"disk       {disk_line(cfg, work, checkpoint_parts(cfg, method, work), steps, trainings, place)}",
    ]
