"""The time of a step: on GPUs, with their price, by the cost model; on a CPU by trying the model with fewer layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from luffy.config import Config
from luffy.dry_run import cost
from luffy.dry_run.memory import Estimate, Work
from luffy.dry_run.place import engine_slots, gpu_named
from luffy.learn.packing import pack
from luffy.learn.scorer import TokenScorer
from luffy.models.forward import key_value_shape
from luffy.models.load import DTYPES, slow_dtype
from luffy.models.machine import Machine, memory_of_machine, timed
from luffy.models.plain import choose_path
from luffy.rollout import NativeEngine
from luffy.types import Request, Sample

SHORT = 0.25  # mean length of responses as a fraction of their limit, if most of them end early
NEW_TOKENS = 8  # of a probe's responses
PROBED_TOKENS = 1024  # of a probe's update, about; fewer if a pass takes more operations than
PROBED_WORK = 1e11  # this, seconds on a laptop
FEWEST_TOKENS, FEWEST_SLOTS = 64, 32


@dataclass(frozen=True)
class StepTime:
    """Seconds; sending the weights to the engine counts as update."""

    rollout: float
    update: float

    @property
    def step(self) -> float:
        return self.rollout + self.update


def time_line(need: Estimate, steps: int, price: float | None) -> str:
    """The time of a step and of all ``steps``."""
    if need.place.on_gpu:
        return f"cost       {gpu_line(need, steps, price)}"
    return f"time       {cpu_line(need, steps)}"


def _parts(cfg: Config, requests: Sequence[Request], timed: bool, found: Sequence[StepTime]) -> str:
    """The parts of a step's time; ``timed``: whether rollouts, if there are any, are in it."""
    if requests and timed:
        return f"rollout {_span(duration(t.rollout) for t in found)}, update {_span(duration(t.update) for t in found)}"
    return "update alone" + (f": how long rollouts of {cfg.rollout.engine} take is not known" if requests else "")


def _span(texts: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(texts))


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 9.5 else f"{number:.2g}"


def duration(seconds: float) -> str:
    """Seconds in the largest unit that has at least 1.5 of them."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 9.5 else f"{seconds:.0f} s"


# ---- on GPUs


def gpu_line(need: Estimate, steps: int, price: float | None) -> str:
    """The same run with short responses and with all of full length."""
    cfg, requests, rented = need.cfg, need.requests, need.place.rented
    gpu = gpu_named(rented) if rented else this_gpu()
    gpus = cfg.parallel.workers
    name = f"{gpus} x {rented.upper() if rented else 'GPU of this machine'}"
    found = times_on_gpus(cfg, need.work, requests, gpu)
    if not found:
        return f"not estimated: the run does not fit on {name}"
    hours = [t.step * steps * gpus / 3600 for t in found]
    paid = "" if price is None else f", {_span(_rounded(h * price) for h in hours)} at {price:g} an hour"
    lengths = " (responses of a quarter of rollout.max_tokens in the mean, and of full length)" if requests else ""
    return (
        f"on {name}: {_span(duration(t.step) for t in found)} a step "
        f"({_parts(cfg, requests, cfg.rollout.engine in cost.TIMED_ENGINES, found)}), "
        f"{_span(duration(t.step * steps) for t in found)} for {steps} steps, {_span(map(_rounded, hours))} GPU "
        f"hours{paid}{lengths}, without rewards, evaluations and checkpoints; by the cost model with "
        f"{gpu.flops / 1e12:.0f} TFLOP/s and {gpu.memory_bandwidth / 1e12:.1f} TB/s (docs/results/cost.md says how it "
        "was checked)"
    )


def times_on_gpus(cfg: Config, work: Work, requests: Sequence[Request], gpu: cost.Gpu) -> list[StepTime]:
    """With short responses and with all of full length; SFT has one. Empty if weights, optimizer and one sequence of
    full length do not fit. Rollouts of a custom engine take no time."""
    if cost.places(step_plan(cfg, work, requests), gpu) < 1:
        return []
    plans = [step_plan(cfg, work, requests, share) for share in ((SHORT, 1.0) if requests else (1.0,))]
    plans = [replace(plan, gathered_once=gathers_once(cfg, plan, gpu)) for plan in plans]
    timed = requests and cfg.rollout.engine in cost.TIMED_ENGINES
    return [
        StepTime(cost.rollout(plan, gpu) if timed else 0.0, cost.update(plan, gpu) + cost.weight_sync(plan, gpu))
        for plan in plans
    ]


def gathers_once(cfg: Config, plan: cost.StepPlan, gpu: cost.Gpu) -> bool:
    """Whether the run would gather weights once per mini-batch (`parallel.gather`)."""
    if cfg.parallel.gather == "auto":
        return not cfg.parallel.cpu_offload and cfg.async_.max_staleness == 0 and cost.fits_gathered(plan, gpu)
    return cfg.parallel.gather == "mini_batch"


def step_plan(cfg: Config, work: Work, requests: Sequence[Request], share: float = 1.0) -> cost.StepPlan:
    """The step for the cost model. ``share``: mean length of the responses as a fraction of their limit, which ``work``
    takes them to have. Without requests: sequences as long as the mean of those of the update."""
    c = work.config
    kv_heads, width = key_value_shape(c)
    outside = c.vocab_size * c.hidden_size * (1 if getattr(c, "tie_word_embeddings", False) else 2)
    prompts = {request.prompt_ids for request in requests}
    return cost.StepPlan(
        cost.Model("", work.parameters, c.num_hidden_layers, c.hidden_size, kv_heads * width, int(outside)),
        gpus=cfg.parallel.workers,
        problems=max(len(prompts), 1),
        samples=len(requests) // max(len(prompts), 1),
        prompt=round(sum(map(len, prompts)) / max(len(prompts), 1)),
        response=max(round(share * max((r.sampling.max_tokens for r in requests), default=work.mean_length)), 1),
        longest=1 / share,
        width=cfg.parallel.rollout_group,
        hybrid=cfg.parallel.shard == "hybrid",
        micro_batch=cfg.batch.tokens,
        updates=cfg.batch.updates,
        adapters=work.lora_rank is not None,
        offloaded=cfg.optim.offload,
        recomputed=work.recomputed_share,
        scored=work.scored,
        trained_tokens=work.tokens - (1 - share) * sum(request.sampling.max_tokens for request in requests),
    )


def this_gpu() -> cost.Gpu:
    """This machine's GPU: the measured rates of a large product and of a copy; the rest as in the cost model."""
    here = Machine.measure(torch.device("cuda"), torch.bfloat16)
    _, total = torch.cuda.mem_get_info()
    return replace(cost.Gpu(), flops=here.flops, memory_bandwidth=here.bandwidth, memory=float(total))


# ---- on a CPU


def cpu_line(need: Estimate, steps: int) -> str:
    """The time if every response is as long as it may become."""
    cfg, work, requests = need.cfg, need.work, need.requests
    if slow_dtype(cfg.model.dtype, "cpu"):
        return f"not tried in {cfg.model.dtype}, which is slow on this CPU"
    timed = cfg.rollout.engine == "native"
    slots = min(engine_slots(cfg, work.on_gpu), len(requests))
    found = time_on_cpu(cfg, work, requests if timed else [], slots)
    if found is None:
        return "not estimated: the model cannot be tried on this machine with fewer layers"
    layers = "one layer" if work.config.num_hidden_layers == 1 else "two layers"
    return (
        f"roughly {duration(found.step)} a step ({_parts(cfg, requests, timed, [found])}), "
        f"{duration(steps * found.step)} for {steps} steps, without rewards, evaluations and checkpoints; tried with "
        f"{layers} of the model on this machine, responses of full length"
    )


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
    """None if the model cannot be tried on this machine: its embeddings alone are too large, or its class cannot be
    made with fewer layers. Without ``requests`` (SFT, or another engine than the native one) the rollout takes no
    time."""
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
    decode = _decode_seconds(model, requests, slots, tokens) if requests else 0.0
    samples = _samples(work, tokens)
    scorer = TokenScorer(model)
    (batch, *_) = pack(samples, sum(map(len, samples)), "token-mean", 1, share=False)

    def update() -> None:
        scorer(batch, 1.0)[0].sum().backward()

    update()
    adam = torch.optim.AdamW(model.parameters(), lr=0.0)
    adam.step()
    return Rates(decode, _seconds(update) / len(batch.input_ids), _seconds(adam.step) / weights)


def _decode_seconds(model: Any, requests: Sequence[Request], slots: int, tokens: int) -> float:
    """Seconds of a decoding step of ``slots`` sequences."""
    tried = min(slots, max(tokens // NEW_TOKENS, FEWEST_SLOTS))
    engine = NativeEngine(model, max_slots=tried)
    first, more = (
        [replace(r, sampling=replace(r.sampling, max_tokens=n, eos_ids=())) for r in requests[:tried]]
        for n in (1, 1 + NEW_TOKENS)
    )
    engine.generate(first)
    seconds = max(_seconds(lambda: engine.generate(more)) - _seconds(lambda: engine.generate(first)), 0.0)
    return seconds * slots / tried / NEW_TOKENS  # so many sequences are bound by arithmetic


def shortened(config: Any, layers: int) -> Any:
    """The config of the same model with its first layers alone."""
    values = config.to_dict() | {"num_hidden_layers": layers}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    return type(config).from_dict(values)


def _samples(work: Work, tokens: int) -> list[Sample]:
    """About so many tokens, in sequences of the mean length of the run's own."""
    length = max(min(int(work.mean_length), tokens) - 1, 1)
    count = max(min(tokens // (length + 1), sum(one.sequences for one in work.every_pass)), 1)
    nothing, ones = torch.zeros(length), torch.ones(length)
    ids = torch.zeros(length, dtype=torch.long)
    return [Sample((0,), ids, nothing.to(torch.int8), ones, nothing, ones, nothing, nothing)] * count


def _seconds(work: Callable[[], object]) -> float:
    """The better of two."""
    return min(timed(work, torch.device("cpu")) for _ in range(2))
