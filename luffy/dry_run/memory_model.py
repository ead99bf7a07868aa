"""The memory model: bytes that an update and a rollout take beside the weights, part by part.

What a layer keeps for its backward pass is counted value by value for both ways it can run: the modules of
`transformers` (on a CPU; exact) and the fused layers (on a GPU). The micro-batches are those that packing makes of the
first batch when every response takes all the tokens it may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from luffy.core.logprobs import CPU_CHUNK_ROWS, GPU_CHUNK_BYTES
from luffy.models.forward import key_value_shape
from luffy.rollout.native import default_prefill_tokens
from luffy.train.activations import CAUTION, MARGIN_BYTES, layer_values
from luffy.train.packing import cut, family_of
from luffy.types import Sample

# Tensors of the size of a chunk of logits that are alive at once while its gradient is made: on a CPU the formula of
# core/logprobs.py step by step; kernels write over the logits.
CPU_HEAD_COPIES = 7
DRAWN_COPIES = 7  # the same while tokens are drawn
ADAPTED = 7  # linear layers of a decoder layer: LoRA of all of them
ALLOCATOR = 1.04  # what GPU memory is above the tensors that are counted (docs/results/performance.md)
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
    """What an update is made of: the model's shape, how it is trained, the passes of its mini-batches, and how many
    times its tokens are ``scored`` before: for old log-probs, for those of the reference, by a teacher. ``unused``: GPU
    memory beside what the update has in any case."""

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

    @property
    def several(self) -> bool:
        """Whether gradients of one pass wait for those of another."""
        return max(map(len, self.passes), default=0) > 1

    @property
    def every_pass(self) -> list[Pass]:
        return [one for mini_batch in self.passes for one in mini_batch]

    @property
    def tokens(self) -> int:
        return sum(one.computed for one in self.every_pass)

    @property
    def recomputed_share(self) -> float:
        """Of the tokens, those whose activations are computed again in the backward pass."""
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


def layer_bytes(work: Work, one: Pass) -> float:
    """What one decoder layer keeps of a pass for its backward pass."""
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
    # Where sequences were copied or padded, attention's result is gathered anew for the layer after it.
    gathered = q * size if one.shares_prompts or one.padded > one.attended else 0
    token += gathered if work.lora_rank is None else _adapter_bytes(work, gathered)
    attention = (2 * q + 2 * kv_heads * width) * size + heads * 4
    return float(token * one.computed + attention * one.padded)


def _adapter_bytes(work: Work, gathered: int) -> float:
    """Per token on a CPU, beyond what the layer keeps without adapters. Frozen weights need no input of theirs,
    adapters theirs in float32, each its own copy unless it is float32 anyway: then ``gathered`` is kept for them."""
    c, size = work.config, work.itemsize
    h, q, inner = c.hidden_size, c.num_attention_heads * key_value_shape(c)[1], _inner(c)
    own = ADAPTED * (work.lora_rank or 0) * 4
    if size == 4:
        return own + gathered - 2 * h * 4
    return own + (5 * h + q + inner) * 4 - (4 * h + inner) * size


def _inner(config: Any) -> int:
    return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def pass_bytes(work: Work, one: Pass) -> float:
    """Activations of a pass at their most: all layers', or, recomputed, the start of each and all of one."""
    layers = int(work.config.num_hidden_layers)
    last = 4 * work.config.hidden_size * one.computed * work.itemsize  # embeddings, last norm, the rows of the head
    if not recomputes(work, one):
        return layers * layer_bytes(work, one) + last
    starts = (2 if work.on_gpu else 1) * work.config.hidden_size * one.computed * work.itemsize
    return layers * starts + layer_bytes(work, one) + last


def logits_bytes(work: Work, one: Pass) -> float:
    """The chunk of logits with what is alive beside it."""
    vocabulary = work.config.vocab_size
    if work.on_gpu:
        rows = max(GPU_CHUNK_BYTES // (vocabulary * work.itemsize), CPU_CHUNK_ROWS)
        return float(min(rows, one.rows) * vocabulary * work.itemsize)
    return float(min(CPU_CHUNK_ROWS, one.rows) * vocabulary * 4 * CPU_HEAD_COPIES)


def recomputes(work: Work, one: Pass) -> bool:
    """As ``GradientCheckpointing`` decides."""
    if work.checkpointing != "auto" or work.unused is None:
        return work.checkpointing is True
    return CAUTION * work.config.num_hidden_layers * layer_bytes(work, one) + MARGIN_BYTES > work.unused


def update_parts(work: Work) -> Parts:
    """Beside weights and optimizer. Activations and logits are at their most when the backward pass begins, gradients
    when it ends: all of them meet only where gradients wait for those of further passes."""
    gradients = float(work.trained * 4)
    largest = float(work.config.vocab_size * work.config.hidden_size * 4)
    at_start: Parts = {}
    for one in work.every_pass:
        parts = {"activations": pass_bytes(work, one), "logits": logits_bytes(work, one)}
        at_start = max(at_start, parts, key=lambda p: sum(p.values()))
    if work.lora_rank is not None:
        largest = 0.0
    if work.several:
        return {"gradients": gradients, **at_start}
    at_start |= {"gradient of the head": largest} if largest else {}
    at_end = {"gradients": gradients, "optimizer's scratch": 0.0 if work.on_gpu else 2 * largest}
    return max(at_start, at_end, key=lambda p: sum(p.values()))


def rollout_parts(work: Work, slots: int, prompts: Sequence[int], longest: int, shared: int) -> Parts:
    """Beside weights and optimizer: keys and values of ``slots`` sequences of at most ``longest`` tokens, the logits
    of one decoding step, and the prompts on their way through a layer. On a GPU ``shared`` samples hold a prompt's
    pages together."""
    c = work.config
    kv_heads, width = key_value_shape(c)
    per_token = 2 * c.num_hidden_layers * kv_heads * width * work.itemsize
    prompt = max(prompts, default=0)
    held = slots * longest if not work.on_gpu else slots * (longest - prompt) + slots * prompt / max(shared, 1)
    at_once = min(sum(prompts), default_prefill_tokens("cuda" if work.on_gpu else "cpu"))
    layer = (3 * _inner(c) + 6 * c.hidden_size) * work.itemsize * at_once
    drawn = slots * c.vocab_size * (work.itemsize + 8 if work.on_gpu else 4 * DRAWN_COPIES)
    return {"KV cache": float(held * per_token), "prompts and logits": float(max(layer, drawn))}
