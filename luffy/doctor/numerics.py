"""Numbers of a tiny random model: its gradient on one rank against all ranks, log-probs of engine and trainer, and the
copy of the weights that rolls out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config import BatchConfig, Config, DataConfig, ModelConfig, RolloutConfig
from luffy.distributed.replica import Replica, copy_of
from luffy.doctor.findings import Cluster, Facts, Line, judged
from luffy.doctor.watch import Context
from luffy.learn.gradient_check import sharded_gradients, whole_gradients
from luffy.learn.policy import Policy
from luffy.models.machine import synchronize
from luffy.models.plain import choose_path
from luffy.models.shapes import SHAPES
from luffy.rollout.native import NativeEngine
from luffy.types import Author, Request, Sample, Sampling, written_by

Dtype = Literal["float32", "bfloat16"]
LARGEST_GAP = 1e-3  # of gradients, relative to the norm, in float32
LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}  # mean, of log-probs
ROUNDS = 3  # of the gradient: a race between streams is not lost every time
CONTEXT = 64  # tokens
REQUESTS = 8
LR = 1e-3  # of the update before a sync
NCCL_REMEDY = (
    "do not train on these ranks: run again with CUDA_LAUNCH_BLOCKING=1 and with fewer ranks, and report the result of "
    "luffy doctor --anonymous --json as a bug"
)


def tiny_policy(device: str) -> nn.Module:
    """A model with the same random weights on every rank, far from a flat distribution, so that errors show."""
    shape = SHAPES["30m" if device == "cuda" else "tiny"]
    config = Qwen2Config(
        **shape,
        max_position_embeddings=CONTEXT,
        eos_token_id=0,
        initializer_range=2 / shape["hidden_size"] ** 0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).eval()
    choose_path(model)
    return model


def config_for(cfg: Config, size: int, dtype: Dtype = "float32") -> Config:
    """The losses of a default run under the sharding of ``cfg``; several micro-batches a rank."""
    parallel = replace(cfg.parallel, workers=size, rollout_group=1)
    return Config(
        launch="torchrun",
        model=ModelConfig(dtype=dtype),
        data=DataConfig(max_prompt_tokens=CONTEXT // 2),
        rollout=RolloutConfig(max_tokens=CONTEXT // 2),
        batch=BatchConfig(tokens=2 * CONTEXT),
        parallel=parallel,
    )


def fixed_samples(count: int, vocabulary: int) -> list[Sample]:
    """Responses of unequal lengths, the same on every rank; every third is a trace."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(count):
        prompt = torch.randint(1, vocabulary, (3 + i % 4,), generator=generator)
        ids = torch.randint(1, vocabulary, (8 + 7 * i % 24,), generator=generator)
        zeros, authors = torch.zeros(len(ids)), written_by(Author.POLICY if i % 3 else Author.TEACHER, len(ids))
        advantages = torch.full((len(ids),), float(torch.randn((), generator=generator)))
        samples.append(Sample(tuple(prompt.tolist()), ids, authors, zeros + 1, zeros, advantages, zeros, zeros))
    return samples


# ---- gradient


def gradient_gap(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, str]:
    """The norm of the difference relative to the norm of ``one``, and the parameter with the largest difference."""
    squares = {name: float((other[name].double() - value.double()).square().sum()) for name, value in one.items()}
    return (sum(squares.values()) ** 0.5) / norm_of(one), max(squares, key=lambda name: squares[name])


def norm_of(gradient: Mapping[str, Tensor]) -> float:
    return sum(float(value.double().square().sum()) for value in gradient.values()) ** 0.5


def measure_gradient(context: Context) -> dict[str, Any] | None:
    """The gradient of a whole copy on this rank alone, against the sharded model over all ranks; with a single process
    on a GPU, against the CPU."""
    world, device = context.world, context.world.device or torch.device(context.device)
    if not world.joined and device.type == "cpu":
        return None
    model, cfg = tiny_policy(context.device), config_for(context.cfg, world.size)
    alone = copy_of(model).to(device if world.joined else torch.device("cpu"))
    context.watch.meet()
    policy = Policy(model if world.joined else model.to(device), cfg, world=world)  # it shards what lies on the host
    names = [name for name, _ in alone.named_parameters()]
    one = whole_gradients(policy, alone, names)
    gaps = []
    for _ in range(ROUNDS):
        context.watch.meet()
        gaps.append(gradient_gap(one, sharded_gradients(policy, names)))
    gap, parameter = max(gaps)
    compared = "all ranks" if world.joined else "the GPU"
    return {"norm": norm_of(one), "gap": gap, "parameter": parameter, "compared": compared}


def judge_gradient(cluster: Cluster, facts: Facts) -> list[Line]:
    norms = sorted(fact["norm"] for fact in facts.values())
    median = norms[len(norms) // 2]
    odd = [rank for rank, fact in facts.items() if not abs(fact["norm"] - median) <= LARGEST_GAP * median]
    fact = max(facts.values(), key=lambda fact: math.inf if math.isnan(fact["gap"]) else fact["gap"])
    if odd:
        text = f"{cluster.name(odd)} alone computes another gradient than the other ranks alone"
        return [Line("gradient", "failed", text, "leave this machine or GPU out; test its memory")]
    single = "one rank" if fact["compared"] == "all ranks" else "the CPU"
    found = f"{fact['compared']} against {single}: relative difference {fact['gap']:.1e} (float32)"
    wrong = not fact["gap"] <= LARGEST_GAP
    return [judged("gradient", found, (wrong, "failed", f", largest in {fact['parameter']}", NCCL_REMEDY))]


# ---- engine against trainer, weight sync


def measure_engine(context: Context) -> dict[str, Any]:
    """Log-probs of sampled tokens by the native engine and by the trainer, after an update and a weight sync."""
    kinds: list[Dtype] = ["float32", "bfloat16"] if context.device == "cuda" else ["float32"]
    return {kind: _engine_against_trainer(context, kind) for kind in kinds}


def _engine_against_trainer(context: Context, dtype: Dtype) -> dict[str, Any]:
    world, device = context.world, context.world.device or torch.device(context.device)
    model = tiny_policy(context.device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model = model if world.joined else model.to(device)
    cfg = config_for(context.cfg, world.size, dtype)
    replica = Replica(model, str(device)) if world.joined else None
    engine = NativeEngine(replica.model if replica else model, REQUESTS, CONTEXT, memory_share=0.05)
    policy = Policy(model, cfg, world=world)
    samples = fixed_samples(2 * world.size, model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    context.watch.meet()
    policy.update(samples[world.rank :: world.size], LR)
    facts: dict[str, Any] = {"sync_s": None}
    if replica is not None:
        replica.refresh(model)
        synchronize(device)
        context.watch.meet()
        world.gather(None)
        started = time.perf_counter()
        replica.refresh(model)
        synchronize(device)
        facts["sync_s"] = time.perf_counter() - started
        facts["sync_bytes"] = sum(p.numel() for p in replica.model.parameters()) * getattr(torch, dtype).itemsize
    engine.sync(1)
    requests = [Request((1 + i, 2 + i, 3 + i), i + REQUESTS * world.rank, Sampling(32)) for i in range(REQUESTS)]
    completions = engine.generate(requests)
    engine.close()
    context.watch.meet()
    ours = policy.log_probs([_sample_of(r, c.token_ids) for r, c in zip(requests, completions, strict=True)])
    gaps = torch.cat([(mine - c.log_probs).abs() for mine, c in zip(ours, completions, strict=True)])
    return {**facts, "mean": float(gaps.mean()), "max": float(gaps.max()), "tokens": gaps.numel()}


def _sample_of(request: Request, ids: Tensor) -> Sample:
    zeros = torch.zeros(len(ids))
    return Sample(request.prompt_ids, ids, zeros.to(torch.int8), zeros + 1, zeros, zeros, zeros, zeros)


def judge_engine(cluster: Cluster, facts: Facts) -> list[Line]:
    lines = []
    for dtype in facts[min(facts)]:
        of_ranks = {rank: fact[dtype] for rank, fact in facts.items()}
        far = [rank for rank, fact in of_ranks.items() if not fact["mean"] <= LARGEST_DIFFERENCE[dtype]]
        mean, most = (max(fact[key] for fact in of_ranks.values()) for key in ("mean", "max"))
        found = f"{dtype}: log-probs differ by {mean:.1e} on average, {most:.1e} at most (native engine)"
        fix = "set rollout.engine to another one, or report the result of luffy doctor --anonymous --json as a bug"
        lines.append(judged("engine", found, (far, "failed", f"; {cluster.name(far)}", fix)))
    dtype, fact = next(reversed(facts[min(facts)].items()))
    seconds = [value[dtype]["sync_s"] for value in facts.values()]
    if None in seconds:
        lines.append(Line("weight sync", "skipped", "one process: the engine runs on the policy's own weights"))
    else:
        size = fact["sync_bytes"]
        rate = f"{size / 1e6:.0f} MB in {max(seconds):.3f} s, {size / max(seconds) / 1e9:.3g} GB/s"
        lines.append(Line("weight sync", "ok", f"{rate} ({dtype}, into the copy of each rank)"))
    return lines
