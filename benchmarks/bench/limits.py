"""Lower bounds of a model's work (bytes read by decoding, operations of an update), and its peak memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from bench.models import parameter_count
from torch import nn

from luffy.errors import UserError
from luffy.models.forward import causal_lm, key_value_shape
from luffy.models.machine import Machine


class Response(NamedTuple):
    """Lengths of a prompt and of what was said to it, in tokens."""

    prompt: int
    new: int


def roofline_seconds(model: nn.Module, responses: Sequence[Response], machine: Machine, slots: int) -> float:
    """Decoding that only reads weights and cached keys and values, each once per step, at the copy's speed."""
    config = causal_lm(model).config
    size = next(model.parameters()).dtype.itemsize
    kv_heads, width = key_value_shape(config)
    per_token = 2 * config.num_hidden_layers * kv_heads * width * size
    # Its t-th step finds prompt + t tokens in the cache; the first token comes from the prefill.
    cached = sum((r.new - 1) * r.prompt + r.new * (r.new - 1) // 2 for r in responses)
    weights = sum(p.numel() * p.itemsize for p in model.parameters()) - _looked_up(model) * size  # as they lie there
    return (_steps([r.new - 1 for r in responses], slots) * weights + cached * per_token) / machine.bandwidth


def update_flops(model: nn.Module, computed_tokens: float) -> float:
    """Forward and through: 4 a parameter and computed token; the gradient of the weight itself: 2, where there is one.
    Recomputation is not work that counts."""
    embedding_trains = causal_lm(model).get_input_embeddings().weight.requires_grad
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) - _looked_up(model) * embedding_trains
    return (4 * (parameter_count(model) - _looked_up(model)) + 2 * trained) * computed_tokens


def _looked_up(model: nn.Module) -> int:
    """Parameters of an embedding that is not the head as well: looked up, neither read in full nor multiplied."""
    config = causal_lm(model).config
    return 0 if config.tie_word_embeddings else int(config.vocab_size * config.hidden_size)


def _steps(lengths: Sequence[int], slots: int) -> int:
    """Decoding steps of rows that take over a slot when it is free, the longest first."""
    busy_until = [0] * min(slots, len(lengths))
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(busy_until, busy_until[0] + length)
    return max(busy_until, default=0)


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of ``peak_gib``."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def limit_memory(device: str, gib: float | None) -> None:
    """Let this process have no more of the GPU than ``gib``."""
    if gib is not None:
        if device != "cuda":
            raise UserError("--memory limits a GPU's memory, and this is a CPU")
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(gib * 2**30 / total, 1.0))


def peak_gib(device: torch.device) -> float | None:
    """Largest memory held by tensors since ``reset_peak``; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
