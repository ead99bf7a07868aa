"""Random models of real shapes, small enough for a test or a dry run: no download, built in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from luffy.errors import UserError

# What each architecture adds to the common shape; the window is short so that tests run past it.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 8},
}


def tiny_model(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model in evaluation mode; ``changes`` go into its config.

    Weights are drawn wider than usual, so that attention and the next-token distribution are far from
    flat and a wrong mask or position shows in the numbers.
    """
    if architecture not in ARCHITECTURES:
        raise UserError(f"unknown tiny architecture '{architecture}': use one of {', '.join(ARCHITECTURES)}")
    shape = {
        "vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(architecture, **{**shape, **ARCHITECTURES[architecture], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = AutoModelForCausalLM.from_config
        model: PreTrainedModel = build(config)
    nn.Module.eval(model)
    return model
