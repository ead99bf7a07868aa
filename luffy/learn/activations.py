"""GPU memory of an update: whether activations are recomputed in the backward pass, whether sharded weights are
gathered once per mini-batch (`parallel.gather`), and what to do when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from luffy.config import Config
from luffy.distributed.shard import gathered_bytes
from luffy.distributed.world import World
from luffy.learn.packing import Bin, family_of
from luffy.learn.scorer import TokenScorer
from luffy.models.forward import causal_lm, key_value_shape, text_config
from luffy.models.machine import unused_bytes
from luffy.types import Sample

# Left for the head's chunk of logits, the gradients of the layer at hand, and what the allocator wastes.
MARGIN_BYTES = 6 << 30
# The estimate counts what the fused layers keep; others keep more, and it is never exact.
CAUTION = 1.25


def layer_values(config: Any) -> tuple[int, int]:
    """Numbers a decoder layer keeps. Per computed token: two norms with their sums, queries, the attention's result,
    and three times the width of its MLP. Per attended token: its key and value, which exist once for every
    response even where the prompt is computed once for all."""
    kv_heads, width = key_value_shape(config)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    computed = 4 * config.hidden_size + 2 * config.num_attention_heads * width + 3 * inner
    return int(computed), int(2 * kv_heads * width)


def activation_bytes(config: Any, tokens: int, attended: int, itemsize: int) -> int:
    per_token, per_attended = layer_values(config)
    return (per_token * tokens + per_attended * attended) * int(config.num_hidden_layers) * itemsize


def recomputed_bytes(config: Any, tokens: int, attended: int, itemsize: int) -> int:
    """Bytes if layers are recomputed: the input of every layer, and all of one layer."""
    layers = int(config.num_hidden_layers)
    inputs = int(config.hidden_size) * tokens * layers * itemsize
    return inputs + activation_bytes(config, tokens, attended, itemsize) // layers


def out_of_memory_advice(error: torch.OutOfMemoryError, cfg: Config) -> str:
    """The error, and the settings that may still help this run, cheapest first."""
    found = str(error).partition(" If reserved but unallocated")[0].strip().rstrip(".")
    left = [f"batch.tokens below {cfg.batch.tokens} (not below {cfg.longest})"] * (cfg.batch.tokens > cfg.longest)
    left += ["model.gradient_checkpointing=true"] * (cfg.model.gradient_checkpointing is not True)
    left += [f"rollout.slots below {cfg.rollout.slots}"] * (cfg.rollout.slots is not None)
    if cfg.launch == "local":
        left += ["optim.offload=true"] * (not cfg.optim.offload)
    else:
        gathers_once = cfg.parallel.gather != "micro_batch" and not cfg.parallel.cpu_offload
        left += ["parallel.gather=micro_batch"] * gathers_once
        left += ["parallel.cpu_offload=true"] * (not cfg.parallel.cpu_offload)
    left += [f"rollout.vllm.memory_fraction below {cfg.rollout.vllm.memory_fraction}"] * (cfg.rollout.engine == "vllm")
    takes_adapters = cfg.model.lora is None and (cfg.launch == "local" or cfg.model.dtype == "float32")
    left += ['in a new run model.lora="{rank: 16}"'] * takes_adapters
    takes_four_bits = cfg.launch == "local" and cfg.model.lora is not None and not cfg.model.four_bits
    left += ["in a new run model.lora.quantize=nf4"] * takes_four_bits
    return f"{found}; try {', '.join(left)}" if left else f"{found}; only shorter responses can help"


class GradientCheckpointing:
    """Switches activation checkpointing of a model: always, never, or (auto) when memory asks for it."""

    def __init__(self, model: nn.Module, wanted: bool | str) -> None:
        self.model, self._wanted = model, wanted
        self._on: bool | None = None

    @property
    def is_on(self) -> bool:
        return bool(self._on)

    def prepare(self, tokens: int, attended: int, device: torch.device, reserved: int = 0) -> bool:
        """Before the forward pass of a micro-batch: ``tokens`` of its row, ``attended`` of its samples; ``reserved``:
        bytes that something else will take meanwhile."""
        may_choose = self._wanted == "auto" and device.type == "cuda"
        on = self._is_tight(tokens, attended, device, reserved) if may_choose else self._wanted is True
        if on != self._on:
            model: Any = self.model
            if on:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()
            self._on = on
        return on

    def leaves_room(self, tokens: int, attended: int, device: torch.device, wanted: int) -> bool:
        """Whether ``wanted`` bytes fit beside the activations of such a micro-batch, without recomputing any that would
        not be recomputed otherwise."""
        on = self._wanted is True or (self._wanted == "auto" and self._is_tight(tokens, attended, device))
        size = recomputed_bytes if on else activation_bytes
        return wanted + self._needed(size, tokens, attended) <= unused_bytes(device)

    def _is_tight(self, tokens: int, attended: int, device: torch.device, reserved: int = 0) -> bool:
        return reserved + self._needed(activation_bytes, tokens, attended) > unused_bytes(device)

    def _needed(self, size: Callable[[Any, int, int, int], int], tokens: int, attended: int) -> float:
        causal = causal_lm(self.model)
        itemsize = causal.get_input_embeddings().weight.itemsize
        return CAUTION * size(text_config(causal.config), tokens, attended, itemsize) + MARGIN_BYTES


class Gathering:
    """One process's part of the decision. Processes may have unequal room, so the caller takes the smallest answer:
    all of them must gather in the same passes."""

    def __init__(self, cfg: Config, world: World, device: torch.device, checkpointing: GradientCheckpointing) -> None:
        self._wanted, self._dtype = cfg.parallel.gather, cfg.model.dtype
        self._device, self._checkpointing = device, checkpointing
        self._never = not world.joined or self._wanted == "micro_batch" or cfg.parallel.cpu_offload
        # Rollouts in another thread take and give back memory meanwhile: what is free now says little.
        self._may_measure = device.type == "cuda" and cfg.async_.max_staleness == 0

    def of_update(self, scorer: TokenScorer, samples: Sequence[Sample], bins: Sequence[Bin]) -> int:
        """Bytes of weights and gradients to keep during the passes of a mini-batch; 0: gather in every pass."""
        if self._never:
            return 0
        wanted = gathered_bytes(scorer, self._dtype, gradients=True)
        if self._wanted == "mini_batch":
            return wanted
        largest = max((_tokens(samples, bin_) for bin_ in bins), default=(0, 0))
        fits = self._may_measure and self._checkpointing.leaves_room(*largest, self._device, wanted)
        return wanted if fits else 0

    def of_scoring(self, scorer: TokenScorer) -> int:
        """The same for passes without gradients; another model than the policy may compute in float32."""
        if self._never:
            return 0
        policy = scorer.model is self._checkpointing.model
        wanted = gathered_bytes(scorer, self._dtype if policy else "float32", gradients=False)
        if self._wanted == "mini_batch":
            return wanted
        fits = self._may_measure and self._checkpointing.leaves_room(0, 0, self._device, wanted)
        return wanted if fits else 0


def _tokens(samples: Sequence[Sample], bin_: Bin) -> tuple[int, int]:
    """Computed and attended tokens of a micro-batch: a prompt once, and once per sample."""
    families = [family_of(samples, members) for members in bin_]
    attended = sum(family.prompt * len(family.responses) + sum(family.responses) for family in families)
    return sum(family.tokens for family in families), attended
