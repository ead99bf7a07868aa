"""Measurements of this machine for the time of a step.

On a CPU the model with one and with two of its layers, random weights, generates a few tokens and makes one small
update; the rest is proportion. Of a GPU the rates are measured that the cost model needs (`luffy.dry_run.cost`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from luffy.config import Config
from luffy.dry_run import cost
from luffy.dry_run.gpu_cost import StepTime, step_plan
from luffy.dry_run.memory_model import Work
from luffy.models.load import DTYPES
from luffy.models.memory import memory_of_machine
from luffy.models.plain import choose_path
from luffy.rollout import NativeEngine
from luffy.train.packing import pack
from luffy.train.scorer import TokenScorer
from luffy.types import Request, Sample

NEW_TOKENS = 8  # of a probe's responses
PROBED_TOKENS = 1024  # of a probe's update, about; fewer where a pass takes more operations than
PROBED_WORK = 1e11  # this, seconds on a laptop
FEWEST_TOKENS, FEWEST_SLOTS = 64, 32


@dataclass(frozen=True)
class Rates:
    """Seconds of a model of some depth: a decoding step, an updated token, an optimizer step on one weight."""

    decode: float
    token: float
    weight: float

    def deeper(self, two: Rates, layers: int) -> Rates:
        """From one layer (self) and two: every further layer takes as long as the second."""
        more = layers - 1
        return Rates(
            self.decode + more * max(two.decode - self.decode, 0.0),
            self.token + more * max(two.token - self.token, 0.0),
            two.weight,
        )


def time_on_cpu(cfg: Config, work: Work, requests: Sequence[Request], slots: int) -> StepTime | None:
    """None where the model cannot be tried on this machine: its embeddings alone are too large, or its class does not
    let itself be made with fewer layers. Without ``requests`` (SFT, or an engine
    that is not the native one) the rollout takes no time."""
    free, _, _ = memory_of_machine(False)
    if 8 * 4 * work.config.vocab_size * work.config.hidden_size > free / 2:
        return None
    layers = int(work.config.num_hidden_layers)
    try:
        one = _rates(cfg, work, requests, slots, 1)
        rates = one if layers == 1 else one.deeper(_rates(cfg, work, requests, slots, 2), layers)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError):
        return None
    steps = math.ceil(len(requests) / max(slots, 1)) * max((r.sampling.max_tokens for r in requests), default=0)
    tokens = work.tokens * step_plan(cfg, work, requests).passes / 3  # one was tried forward and backward
    return StepTime(steps * rates.decode, tokens * rates.token + len(work.passes) * work.trained * rates.weight)


def _rates(cfg: Config, work: Work, requests: Sequence[Request], slots: int, layers: int) -> Rates:
    dtype, trust = DTYPES[cfg.model.dtype], cfg.model.trust_remote_code  # a model's own config often says bfloat16
    model: Any = AutoModelForCausalLM.from_config(
        shortened(work.config, layers), dtype=dtype, trust_remote_code=trust
    ).eval()
    choose_path(model)
    weights = sum(p.numel() for p in model.parameters())
    tokens = int(min(max(PROBED_WORK / (6 * weights), FEWEST_TOKENS), PROBED_TOKENS))
    decode = 0.0
    if requests:
        tried = min(slots, max(tokens // NEW_TOKENS, FEWEST_SLOTS))
        engine = NativeEngine(model, max_slots=tried)
        first, more = ([_short(r, n) for r in requests[:tried]] for n in (1, 1 + NEW_TOKENS))
        engine.generate(first)
        decode = max(_seconds(lambda: engine.generate(more)) - _seconds(lambda: engine.generate(first)), 0.0)
        decode *= slots / tried  # so many sequences are bound by arithmetic
    samples = _samples(work, tokens)
    scorer = TokenScorer(model)
    (batch, *_) = pack(samples, sum(map(len, samples)), "token-mean", 1, share=False)

    def update() -> None:
        scorer(batch, 1.0)[0].sum().backward()

    update()
    adam = torch.optim.AdamW(model.parameters(), lr=0.0)
    adam.step()
    return Rates(decode / NEW_TOKENS, _seconds(update) / len(batch.input_ids), _seconds(adam.step) / weights)


def shortened(config: Any, layers: int) -> Any:
    """The config of the same model with its first layers alone."""
    values = config.to_dict() | {"num_hidden_layers": layers}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    return type(config).from_dict(values)


def _short(request: Request, tokens: int) -> Request:
    return replace(request, sampling=replace(request.sampling, max_tokens=tokens, eos_ids=()))


def _samples(work: Work, tokens: int) -> list[Sample]:
    """About so many tokens, in sequences of the mean length of the run's own."""
    passes = work.every_pass
    sequences = sum(one.sequences for one in passes)
    length = max(min(sum(one.attended for one in passes) // sequences, tokens) - 1, 1)
    count = max(min(tokens // (length + 1), sequences), 1)
    nothing, ones = torch.zeros(length), torch.ones(length)
    ids = torch.zeros(length, dtype=torch.long)
    return [Sample((0,), ids, nothing.bool(), ones, nothing, ones, nothing, nothing)] * count


def _seconds(work: Callable[[], object]) -> float:
    """The better of two."""
    best = math.inf
    for _ in range(2):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def this_gpu() -> cost.Gpu:
    """The rates of a large product and of a copy, measured; the rest as in the cost model."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    block = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")

    def run(work: Callable[[], object]) -> float:
        def whole() -> None:
            work()
            torch.cuda.synchronize()

        whole()
        return _seconds(whole)

    flops = 2 * 8192**3 / run(lambda: matrix @ matrix)
    bandwidth = 2 * block.numel() / run(block.clone)
    _, total = torch.cuda.mem_get_info()
    return replace(cost.Gpu(), flops=flops, memory_bandwidth=bandwidth, memory=float(total))
