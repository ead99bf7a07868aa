"""Tokens per second of the update, and its share of the matrix rate."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.kernels import top_kernels
from bench.limits import peak_gib, reset_peak, update_flops
from bench.models import model_of, random_model
from torch import nn

from luffy.config import Config
from luffy.errors import UserError
from luffy.learn.packing import computed_tokens, cut
from luffy.learn.policy import Policy
from luffy.models.forward import causal_lm
from luffy.models.load import DtypeName
from luffy.models.machine import Machine, timed
from luffy.schema import build
from luffy.train.weights import add_adapters, load_policy
from luffy.types import Author, Sample, written_by


def random_samples(count: int, group: int, prompt_tokens: int, response_tokens: int, vocabulary: int) -> list[Sample]:
    """``group`` responses to each prompt; the last prompt has what is left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (count, prompt_tokens + response_tokens), generator=generator)
    prompts = [tuple(row[:prompt_tokens].tolist()) for row in ids[::group]]
    everywhere = torch.ones(response_tokens, dtype=torch.bool)
    log_probs, authors = torch.full((response_tokens,), -1.0), written_by(Author.POLICY, response_tokens)
    return [
        Sample(
            prompts[i // group], row[prompt_tokens:].clone(), authors, everywhere.float(), (~everywhere).float(),
            torch.full((response_tokens,), 0.5 if i % 2 else -0.5), log_probs, log_probs,
        )
        for i, row in enumerate(ids)
    ]  # fmt: skip


def checkpointing_knob(text: str) -> bool | str:
    words: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
    if text not in words:
        raise UserError(f"checkpointing '{text}' is unknown: use auto, true or false")
    return words[text]


def model_knobs(checkpointing: str, lora: int, quantize: str) -> dict[str, Any]:
    if quantize and not lora:
        raise UserError("--quantize freezes the weights: give --lora too")
    adapters = {"rank": lora, "quantize": quantize or None} if lora else None
    return {"gradient_checkpointing": checkpointing_knob(checkpointing), "lora": adapters}


def update_config(
    tokens: int, response_tokens: int, checkpointing: str, offload: bool, lora: int, quantize: str,
    dtype: DtypeName, device: str,
) -> Config:  # fmt: skip
    model = {"path": "bench", "dtype": dtype, "device": device}
    return build(Config, {
        "model": {**model, **model_knobs(checkpointing, lora, quantize)},
        "data": {"train": "bench", "max_prompt_tokens": 1},
        "rollout": {"max_tokens": response_tokens},
        "batch": {"tokens": tokens},
        "algorithm": {"entropy_coef": 0.0},
        "optim": {"offload": offload},
    })  # fmt: skip


def trained_model(shape: str, path: Path | None, cfg: Config, device: str) -> nn.Module:
    """With the config's adapters. Weights are quantized as they are read, so random ones go through a folder."""
    if cfg.model.lora is None or not cfg.model.four_bits:
        model = model_of(shape, path, cfg.model.dtype, device)
        return model if cfg.model.lora is None else add_adapters(model, cfg.model)
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            random_model(shape, cfg.model.dtype, device).save_pretrained(folder)
        return load_policy(replace(cfg.model, path=str(path or folder)), device)


def bench_update(
    model: nn.Module,
    cfg: Config,
    count: int,
    group: int,
    prompt_tokens: int,
    response_tokens: int,
    repeats: int = 2,
    kernels: bool = False,
) -> tuple[Machine, dict[str, Any]]:
    """One optimizer step over ``count`` samples, ``group`` of each prompt; the first call warms up and makes the
    optimizer's state. With ``kernels``, one more says where the time goes."""
    weight = next(model.parameters())
    machine = Machine.measure(weight.device, weight.dtype)
    policy = Policy(model, cfg)
    samples = random_samples(count, group, prompt_tokens, response_tokens, causal_lm(model).config.vocab_size)
    few = samples[: max(1, cfg.batch.tokens // (prompt_tokens + response_tokens))]
    policy.update(few, cfg.optim.lr)
    reset_peak(weight.device)
    seconds = [timed(lambda: policy.update(samples, cfg.optim.lr), weight.device) for _ in range(repeats)]
    tokens = count * (prompt_tokens + response_tokens)
    computed = computed_tokens(samples, cut(samples, cfg.batch.tokens, policy.scorer.shares_prompts))
    best = min(seconds)
    row = {
        "samples": count, "group": group, "prompt_tokens": prompt_tokens, "response_tokens": response_tokens,
        "tokens": tokens, "computed_tokens": computed,
        "seconds": best, "all_seconds": seconds, "tokens_per_second": tokens / best,
        "mfu": update_flops(model, computed) / best / machine.flops, "checkpointing": policy.checkpointing.is_on,
        "micro_batch_tokens": cfg.batch.tokens, "peak_gib": peak_gib(weight.device),
    }  # fmt: skip
    if kernels:
        row["kernels"] = top_kernels(lambda: policy.update(samples, cfg.optim.lr), weight.device)
    return machine, row
