"""Random models of real shapes, small enough for a test or a dry run: no download, built in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from luffy.errors import UserError
from luffy.types import Request, Sampling

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


def small_model(architecture: str = "qwen2", **changes: Any) -> PreTrainedModel:
    """A smaller one, for tests that generate much; its biases, zero in a new model, are drawn too."""
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = tiny_model(architecture, **{**shape, **changes})
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(generator=generator)
    return model


# For a model of any size: prompts of different lengths, greedy and sampled by turns.
REQUESTS = [Request(tuple(range(3, 5 + i)), i, Sampling(12, 0.0 if i % 2 else 1.0)) for i in range(5)]
