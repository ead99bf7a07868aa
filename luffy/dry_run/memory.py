"""The memory model: bytes that a step of a run takes, part by part.

What a layer keeps for its backward pass is counted value by value for both ways it can run: the modules of
`transformers` (on a CPU; exact) and the fused layers (on a GPU). The micro-batches are those that packing makes of the
first batch when every response takes all the tokens it may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from luffy.config import Config
from luffy.core.logprobs import CPU_CHUNK_ROWS, GPU_CHUNK_BYTES
from luffy.dry_run.cost import TIMED_ENGINES, Gpu
from luffy.dry_run.models import OtherModels, parameters_of
from luffy.dry_run.place import Place, engine_slots
from luffy.learn.activations import CAUTION, MARGIN_BYTES, layer_values
from luffy.learn.packing import cut, family_of
from luffy.models.forward import key_value_shape, text_config
from luffy.models.load import DTYPES
from luffy.models.machine import resident_bytes
from luffy.rollout.native import default_prefill_tokens
from luffy.types import Request, Sample

GIB = 2**30
SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
LOADED_LATER = GIB // 10  # libraries and scratch memory that only a training touches, on a CPU
# Tensors of the size of a chunk of logits that are alive at once: while its gradient is made on a CPU (kernels write
# over the logits), and while tokens are sampled.
CPU_HEAD_COPIES, SAMPLED_COPIES = 7, 7
ADAPTED = 7  # linear layers of a decoder layer: LoRA of all of them
ALLOCATOR = 1.04  # GPU memory above the tensors that are counted (docs/results/performance.md)
Parts = dict[str, float]


@dataclass(frozen=True)
class Pass:
    """A micro-batch. ``attended`` counts whole sequences, a prompt before each response; ``padded`` with the padding
    that attention needs without the kernel for packed sequences; ``rows`` are the tokens whose logits are wanted."""

    computed: int
    attended: int
    padded: int
    rows: int
    sequences: int
    shares_prompts: bool


@dataclass(frozen=True)
class Work:
    """An update: the model's shape, how it is trained, the passes of its mini-batches, and how many times its tokens
    are ``scored`` before (old log-probs, reference, teacher). ``unused``: GPU memory left by weights, optimizer and
    gradients; ``saved``: bytes that four-bit weights save."""

    config: Any
    parameters: int
    trained: int
    itemsize: int
    on_gpu: bool
    lora_rank: int | None
    checkpointing: bool | str
    passes: Sequence[Sequence[Pass]]  # by mini-batch
    scored: float = 0
    unused: float | None = None
    saved: float = 0

    @property
    def weight_bytes(self) -> float:
        """Bytes of the policy's weights, unsharded."""
        return self.parameters * self.itemsize - self.saved

    @property
    def every_pass(self) -> list[Pass]:
        return [one for mini_batch in self.passes for one in mini_batch]

    @property
    def tokens(self) -> int:
        return sum(one.computed for one in self.every_pass)

    @property
    def mean_length(self) -> float:
        """Mean tokens of a sequence."""
        passes = self.every_pass
        return sum(one.attended for one in passes) / max(sum(one.sequences for one in passes), 1)

    @property
    def recomputed_share(self) -> float:
        """Fraction of the tokens whose activations are computed again in the backward pass."""
        return sum(one.computed for one in self.every_pass if recomputes(self, one)) / max(self.tokens, 1)


def planned_sample(prompt_ids: Sequence[int], tokens: int) -> Sample:
    """A sample of so many response tokens, without memory for them."""
    nothing = torch.empty(tokens, device="meta")
    return Sample(tuple(prompt_ids), nothing, nothing, nothing, nothing, nothing, nothing, nothing)


def passes_of(samples: Sequence[Sample], budget: int, share: bool) -> list[Pass]:
    """The micro-batches that packing makes of a mini-batch."""
    out = []
    for bin_ in cut(samples, budget, share):
        families = [family_of(samples, members) for members in bin_]
        lengths = [family.prompt + n for family in families for n in family.responses]
        out.append(
            Pass(
                computed=sum(family.tokens for family in families),
                attended=sum(lengths),
                padded=len(lengths) * max(lengths),
                rows=sum(sum(family.responses) for family in families),
                sequences=len(lengths),
                shares_prompts=any(len(family.responses) > 1 for family in families),
            )
        )
    return out


# ---- an update


def layer_bytes(work: Work, one: Pass) -> float:
    """Bytes that one decoder layer keeps of a pass for its backward pass."""
    if work.on_gpu:
        per_token, per_attended = layer_values(work.config)
        per_token += ADAPTED * (work.lora_rank or 0)  # inputs are kept for adapters as for weights
        return float((per_token * one.computed + per_attended * one.attended) * work.itemsize)
    c = work.config
    kv_heads, width = key_value_shape(c)
    heads = c.num_attention_heads
    inner, q, size = _inner(c), heads * width, work.itemsize
    # Two norms: their input in float32, that input normalised, and what it gives to the linear layers. Four of the MLP.
    token = 2 * c.hidden_size * 4 + 4 * c.hidden_size * size + 4 * inner * size + 2 * 4
    # If sequences were copied or padded, attention's result is gathered anew for the layer after it.
    gathered = q * size if one.shares_prompts or one.padded > one.attended else 0
    token += gathered if work.lora_rank is None else _adapter_bytes(work, gathered)
    attention = (2 * q + 2 * kv_heads * width) * size + heads * 4
    return float(token * one.computed + attention * one.padded)


def _adapter_bytes(work: Work, gathered: int) -> float:
    """Bytes per token on a CPU beyond those of a layer without adapters. Frozen weights need no input of theirs,
    adapters theirs in float32, each its own copy unless it is float32 anyway: then ``gathered`` is kept for them."""
    c, size = work.config, work.itemsize
    h, q, inner = c.hidden_size, c.num_attention_heads * key_value_shape(c)[1], _inner(c)
    own = ADAPTED * (work.lora_rank or 0) * 4
    if size == 4:
        return own + gathered - 2 * h * 4
    return own + (5 * h + q + inner) * 4 - (4 * h + inner) * size


def _inner(config: Any) -> int:
    return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def recomputes(work: Work, one: Pass) -> bool:
    """Whether ``GradientCheckpointing`` recomputes the activations of a pass."""
    if work.checkpointing != "auto" or work.unused is None:
        return work.checkpointing is True
    return CAUTION * work.config.num_hidden_layers * layer_bytes(work, one) + MARGIN_BYTES > work.unused


def pass_parts(work: Work, one: Pass) -> Parts:
    """Activations of a pass at their peak (of all layers or, recomputed, the input of each and all of one), and a chunk
    of logits with what is alive at the same time."""
    c, size = work.config, work.itemsize
    activations = 4 * c.hidden_size * one.computed * size  # embeddings, last norm, the rows of the head
    if recomputes(work, one):
        inputs = (2 if work.on_gpu else 1) * c.hidden_size * one.computed * size
        activations += c.num_hidden_layers * inputs + layer_bytes(work, one)
    else:
        activations += c.num_hidden_layers * layer_bytes(work, one)
    chunk = max(GPU_CHUNK_BYTES // (c.vocab_size * size), CPU_CHUNK_ROWS) if work.on_gpu else CPU_CHUNK_ROWS
    logits = min(chunk, one.rows) * c.vocab_size * (size if work.on_gpu else 4 * CPU_HEAD_COPIES)
    return {"activations": float(activations), "logits": float(logits)}


def update_parts(work: Work) -> Parts:
    """Bytes of an update beside weights and optimizer. Activations and logits peak when the backward pass begins,
    gradients when it ends: all of them meet only if gradients wait for those of further passes."""
    gradients = {"gradients": float(work.trained * 4)}
    head = 0.0 if work.lora_rank is not None else float(work.config.vocab_size * work.config.hidden_size * 4)
    at_start: Parts = max((pass_parts(work, one) for one in work.every_pass), key=_total, default={})
    if max(map(len, work.passes), default=0) > 1:
        return gradients | at_start
    at_start |= {"gradient of the head": head} if head else {}
    return max(at_start, gradients | {"optimizer's scratch": 0.0 if work.on_gpu else 2 * head}, key=_total)


def _total(parts: Parts) -> float:
    return sum(parts.values())


# ---- a rollout


def rollout_parts(work: Work, slots: int, prompts: Sequence[int], longest: int, shared: int) -> Parts:
    """Bytes of a rollout beside weights and optimizer: keys and values of ``slots`` sequences of at most ``longest``
    tokens, the logits of one decoding step, and the prompts on their way through a layer. On a GPU ``shared`` samples
    hold a prompt's pages together."""
    c = work.config
    kv_heads, width = key_value_shape(c)
    per_token = 2 * c.num_hidden_layers * kv_heads * width * work.itemsize
    prompt = max(prompts, default=0)
    held = slots * longest if not work.on_gpu else slots * (longest - prompt) + slots * prompt / max(shared, 1)
    at_once = min(sum(prompts), default_prefill_tokens("cuda" if work.on_gpu else "cpu"))
    layer = (3 * _inner(c) + 6 * c.hidden_size) * work.itemsize * at_once
    sampled = slots * c.vocab_size * (work.itemsize + 8 if work.on_gpu else 4 * SAMPLED_COPIES)
    return {"KV cache": float(held * per_token), "prompts and logits": float(max(layer, sampled))}


# ---- a run


def shards_of(cfg: Config) -> int:
    """Processes that share one copy of the weights; hybrid, those of a machine as large as the cost model's."""
    p = cfg.parallel
    if cfg.launch == "local":
        return 1
    return p.shard_size or (min(p.workers, Gpu.per_machine) if p.shard == "hybrid" else p.workers)


def kept_parts(cfg: Config, method: str, work: Work, others: OtherModels) -> Parts:
    """Bytes that stay in memory from step to step."""
    local, shards, size = cfg.launch == "local", shards_of(cfg), work.itemsize
    master = 4 if size == 2 and cfg.model.lora is None and local else 0
    optimizer = 0 if cfg.optim.offload and work.on_gpu else moment_bytes(cfg, method) + master
    parts = {
        "runtime": 0.0 if work.on_gpu else float(resident_bytes() + LOADED_LATER),
        "weights": work.weight_bytes if local else work.parameters * 4 / shards,  # sharded weights are the masters
        "optimizer": work.trained * optimizer / shards,
    }
    lags = method == "rl" and cfg.async_.max_staleness > 0
    if cfg.loads_reference(method):
        parts["reference"] = work.parameters * size / shards
    if not local or lags:
        parts["copies for rollouts"] = work.weight_bytes * (2 if lags else 1)
    if others.second is not None:
        parts["second model"] = float(parameters_of(others.second) * _second_itemsize(cfg))
    if method == "rl":
        parts["teacher"] = _teacher_bytes(cfg, work, others.teacher) / shards
        parts["fp8 copy"] = float(work.parameters) if cfg.rollout.precision == "fp8" else 0.0
    return {name: size for name, size in parts.items() if size}


def moment_bytes(cfg: Config, method: str) -> int:
    """Bytes of the moments of a trained weight; SFT steps have an optimizer of their own."""
    return 16 if method == "rl" and cfg.sft_steps.buffer else 8


def _second_itemsize(cfg: Config) -> int:
    knobs = cfg.rollout.overrides
    return SIZES[(knobs and knobs.dtype) or cfg.model.dtype]


def _teacher_bytes(cfg: Config, work: Work, model: Any) -> float:
    """Bytes over all processes: a separate model; the trained weights in float32 if they are averaged; a copy of the
    initial policy, unless it is the policy without its adapters."""
    size = SIZES[cfg.teacher.dtype or cfg.model.dtype]
    if model is not None:
        return float(parameters_of(model) * size)
    if cfg.teacher.average:
        return float(work.trained * 4)
    return float(work.parameters * size) if cfg.teacher.is_self and cfg.model.lora is None else 0.0


def memory_needs(
    cfg: Config, work: Work, requests: Sequence[Request], others: OtherModels, kept: Parts
) -> dict[str, Parts]:
    """Bytes of each phase by part. If rollouts and updates take turns, each has its own beside what is ``kept``. Those
    of a custom engine are not known."""
    gathered = cfg.parallel.gather == "mini_batch"  # auto gathers once only if there is room
    update = update_parts(replace(work, trained=work.trained // (1 if gathered else shards_of(cfg))))
    update |= {"gathered weights": float(work.parameters * work.itemsize)} if gathered else {}
    if not requests or cfg.rollout.engine not in TIMED_ENGINES:
        return {"update": kept | update}
    slots = min(engine_slots(cfg, work.on_gpu), len(requests))
    longest = max(len(r.given_ids) + r.sampling.max_tokens for r in requests)
    prompts = [len(ids) for ids in {r.given_ids for r in requests}]
    rollout = rollout_parts(work, slots, prompts, longest, len(requests) // len(prompts))
    if others.second is not None:
        second = replace(work, config=text_config(others.second.config), itemsize=_second_itemsize(cfg))
        rollout["second KV cache"] = rollout_parts(second, slots, prompts, longest, 1)["KV cache"]
    if cfg.async_.max_staleness > 0:
        return {"update beside rollouts": kept | update | rollout}
    return {"update": kept | update, "rollout": kept | rollout}


@dataclass(frozen=True)
class Estimate:
    """The memory of a run in each process: the work of its update, its requests, and bytes by phase and part."""

    cfg: Config
    work: Work
    requests: Sequence[Request]
    needs: dict[str, Parts]
    place: Place

    @classmethod
    def of(
        cls, cfg: Config, method: str, work: Work, requests: Sequence[Request], others: OtherModels, place: Place
    ) -> Estimate:
        """Count the bytes of a run in a place; the memory that is unused there decides on recomputing."""
        kept = kept_parts(cfg, method, work, others)
        if place.on_gpu:
            work = replace(work, unused=place.free - _total(kept) - work.trained * 4 / shards_of(cfg))
        return cls(cfg, work, requests, memory_needs(cfg, work, requests, others, kept), place)

    @property
    def totals(self) -> dict[str, float]:
        """Bytes of each phase."""
        return {phase: self._above * _total(parts) for phase, parts in self.needs.items()}

    @property
    def _above(self) -> float:
        return ALLOCATOR if self.work.on_gpu else 1.0

    def line(self) -> str:
        """The phase that needs the most, part by part; the others as a sum; and what the place of the run has."""
        cfg, place, totals = self.cfg, self.place, self.totals
        phase = max(totals, key=lambda name: totals[name])
        shown = ", ".join(f"{name} {self._above * size / GIB:.2f}" for name, size in self.needs[phase].items())
        others = "".join(f"; {name} {total / GIB:.2f} GiB" for name, total in totals.items() if name != phase)
        if self.requests and cfg.rollout.engine not in TIMED_ENGINES:
            others += f"; how much rollouts of {cfg.rollout.engine} need is not known"
        each = "" if cfg.launch == "local" else f" in each of {cfg.parallel.workers} processes"
        host = f"; {12 * self.work.trained / GIB:.1f} GiB of host memory for optim.offload" if cfg.optim.offload else ""
        free = "" if place.rented else f", {place.free / GIB:.1f} free"
        short = "" if totals[phase] <= place.free else ": TOO LITTLE (docs/troubleshooting.md, out of memory)"
        return (
            f"about {totals[phase] / GIB:.2f} GiB at the peak{each}, in the {phase}: {shown} GiB{others}{host}; "
            f"{place.name} has {place.total / GIB:.1f} GiB{free}{short}"
        )
