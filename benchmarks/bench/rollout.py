"""New tokens per second of the native engine, and how far from the memory's limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.kernels import top_kernels
from bench.limits import Response, peak_gib, reset_peak, roofline_seconds
from torch import nn

from luffy.errors import UserError
from luffy.models.forward import causal_lm
from luffy.models.machine import Machine, synchronize
from luffy.rollout import NativeEngine
from luffy.rollout.native.native_engine import Precision
from luffy.types import Request, Sampling

PROFILED_TOKENS = 64  # of a response: every decoding step has the same kernels, and reading a profile takes long


@dataclass(frozen=True)
class RolloutRun:
    prompts: int
    prompt_tokens: int
    new_tokens: int
    samples: int = 1

    @classmethod
    def parse(cls, text: str, samples: int = 1) -> RolloutRun:
        """PROMPTSxPROMPT_TOKENSxNEW_TOKENS."""
        try:
            prompts, prompt_tokens, new_tokens = map(int, text.split("x"))
        except ValueError:
            raise UserError(f"run '{text}' is not PROMPTSxPROMPT_TOKENSxNEW_TOKENS, e.g. 64x128x256") from None
        if min(prompts, prompt_tokens, new_tokens) < 1:
            raise UserError(f"run '{text}' has a number below 1")
        return cls(prompts, prompt_tokens, new_tokens, samples)

    def requests(self, vocabulary: int, seed: int = 0) -> list[Request]:
        """Fresh random prompts; no response ends before its last token."""
        rng = random.Random(seed)
        sampling = Sampling(self.new_tokens, temperature=1.0)
        prompts = [tuple(rng.randrange(3, vocabulary) for _ in range(self.prompt_tokens)) for _ in range(self.prompts)]
        return [Request(p, i, sampling) for i, p in enumerate(p for p in prompts for _ in range(self.samples))]


def bench_rollout(
    model: nn.Module,
    runs: Sequence[RolloutRun],
    repeats: int = 2,
    slots: int | None = None,
    kernels: bool = False,
    merged: bool = True,
    precision: Precision = "model",
) -> tuple[Machine, list[dict[str, Any]]]:
    """The best of ``repeats`` calls each, after one that warms up (kernels are compiled, graphs captured). With
    ``kernels``, one more call of at most 64 tokens a response says where the time goes. ``merged`` and
    ``precision``: as of `NativeEngine`; ``quantize_s`` of a row is what a copy in fp8 took, None without one."""
    weight = next(model.parameters())
    machine = Machine.measure(weight.device, weight.dtype)
    engine = NativeEngine(model, max_slots=slots, merged=merged, precision=precision)
    rows = [_bench_run(engine, run, repeats, machine) for run in runs]
    if kernels:
        for row, run in zip(rows, runs, strict=True):
            row["kernels"] = _kernels(engine, run)
    return machine, rows


def _bench_run(engine: NativeEngine, run: RolloutRun, repeats: int, machine: Machine) -> dict[str, Any]:
    device = next(engine.model.parameters()).device
    vocabulary = causal_lm(engine.model).config.vocab_size
    # The warm-up is short in tokens but has all the rows.
    engine.generate(replace(run, new_tokens=min(run.new_tokens, 4)).requests(vocabulary))
    reset_peak(device)
    engine.metrics()  # those of the warm-up
    seconds, quantizing = [], []
    for repeat in range(repeats):
        requests = run.requests(vocabulary, seed=repeat)
        synchronize(device)
        completions = engine.generate(requests)
        seconds.append(engine.stats.seconds)
        if (copying := engine.metrics().get("rollout/quantize_s")) is not None:
            quantizing.append(copying.value)
    tokens = sum(len(c.token_ids) for c in completions)
    assert tokens == run.prompts * run.samples * run.new_tokens
    best = min(seconds)
    responses = [Response(run.prompt_tokens, c.token_ids.numel()) for c in completions]
    limit = roofline_seconds(engine.model, responses, machine, engine.max_slots)
    return {
        "prompts": run.prompts, "samples": run.samples, "prompt_tokens": run.prompt_tokens,
        "new_tokens": run.new_tokens, "seconds": best, "all_seconds": seconds, "tokens_per_second": tokens / best,
        "decode_steps": engine.stats.decode_steps, "roofline_share": limit / best, "peak_gib": peak_gib(device),
        "quantize_s": min(quantizing, default=None),
    }  # fmt: skip


def _kernels(engine: NativeEngine, run: RolloutRun) -> list[dict[str, Any]]:
    model = causal_lm(engine.model)
    short = replace(run, new_tokens=min(run.new_tokens, PROFILED_TOKENS))
    requests = short.requests(model.config.vocab_size, seed=-1)
    return top_kernels(lambda: engine.generate(requests), model.device)
