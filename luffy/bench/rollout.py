"""New tokens per second of the native engine, and how far from the memory's limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from luffy.bench.machine import Machine, peak_gib, reset_peak, synchronize
from luffy.errors import UserError
from luffy.models.forward import causal_lm
from luffy.rollout import NativeEngine
from luffy.types import Request, Sampling


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
        return cls(prompts, prompt_tokens, new_tokens, samples)

    def requests(self, vocabulary: int, seed: int = 0) -> list[Request]:
        """Fresh random prompts; no response ends before its last token."""
        rng = random.Random(seed)
        sampling = Sampling(self.new_tokens, temperature=1.0)
        prompts = [tuple(rng.randrange(3, vocabulary) for _ in range(self.prompt_tokens)) for _ in range(self.prompts)]
        return [Request(p, i, sampling) for i, p in enumerate(p for p in prompts for _ in range(self.samples))]


def bench_rollout(
    model: nn.Module, runs: Sequence[RolloutRun], repeats: int = 2, slots: int | None = None
) -> tuple[Machine, list[dict[str, Any]]]:
    """The best of ``repeats`` calls each, after one that warms up (kernels are compiled, graphs captured)."""
    weight = next(model.parameters())
    machine = Machine.measure(weight.device, weight.dtype)
    engine = NativeEngine(model, max_slots=slots)
    return machine, [_bench_run(engine, run, repeats, machine) for run in runs]


def _bench_run(engine: NativeEngine, run: RolloutRun, repeats: int, machine: Machine) -> dict[str, Any]:
    device = next(engine.model.parameters()).device
    vocabulary = causal_lm(engine.model).config.vocab_size
    # The warm-up is short in tokens but has all the rows.
    engine.generate(replace(run, new_tokens=min(run.new_tokens, 4)).requests(vocabulary))
    reset_peak(device)
    seconds = []
    for repeat in range(repeats):
        requests = run.requests(vocabulary, seed=repeat)
        synchronize(device)
        completions = engine.generate(requests)
        seconds.append(engine.stats.seconds)
    tokens = sum(len(c.token_ids) for c in completions)
    assert tokens == run.prompts * run.samples * run.new_tokens
    best = min(seconds)
    limit = roofline_seconds(engine.model, run, machine, engine.max_slots)
    return {
        "prompts": run.prompts, "samples": run.samples, "prompt_tokens": run.prompt_tokens,
        "new_tokens": run.new_tokens, "seconds": best, "all_seconds": seconds, "tokens_per_second": tokens / best,
        "decode_steps": engine.stats.decode_steps, "roofline_share": limit / best, "peak_gib": peak_gib(device),
    }  # fmt: skip


def roofline_seconds(model: nn.Module, run: RolloutRun, machine: Machine, slots: int) -> float:
    """Decoding that only reads weights and cached keys and values, each once per step, at the copy's speed."""
    config = causal_lm(model).config
    size = next(model.parameters()).dtype.itemsize
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = (sum(p.numel() for p in model.parameters()) - embedding) * size
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * size
    rows = run.prompts * run.samples
    waves = -(-rows // slots)
    cached = rows * sum(run.prompt_tokens + t for t in range(1, run.new_tokens))
    return (waves * (run.new_tokens - 1) * weights + cached * per_token) / machine.bandwidth
