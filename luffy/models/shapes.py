"""Shapes of known models: what they need in memory and how fast they run depends on nothing else."""

from __future__ import annotations

import re
from typing import Any

from transformers import Qwen2Config

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True},
    "30m": {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
            "intermediate_size": 1024, "vocab_size": 32000, "tie_word_embeddings": True},
    "smollm2-135m": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
                     "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
    "smollm2-360m": {"hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5,
                     "intermediate_size": 2560, "vocab_size": 49152, "tie_word_embeddings": True},
    "qwen2-0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                   "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2-1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
                   "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2-3b": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
                 "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2-7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                 "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
    "qwen2-14b": {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
                  "intermediate_size": 13824, "vocab_size": 152064, "tie_word_embeddings": False},
    "qwen2-32b": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
                  "intermediate_size": 27648, "vocab_size": 152064, "tie_word_embeddings": False},
    "qwen2-72b": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                  "intermediate_size": 29568, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)  # 7B of Qwen2.5-7B-Instruct
FARTHEST = 1.25  # times as many parameters, or as few, as a shape that stands for a model


def shape_config(name: str) -> Qwen2Config:
    shape = SHAPES[name]
    return Qwen2Config(**shape, max_position_embeddings=32768, eos_token_id=shape["vocab_size"] - 1)


def millions_in(name: str) -> float | None:
    """The parameters that a model's name tells, in millions; None where it tells none."""
    found = SIZE.search(name)
    return None if found is None else float(found[1]) * (1000 if found[2].lower() == "b" else 1)


def nearest_shape(name: str) -> str | None:
    """The known shape of about as many parameters as a model's name tells; None where there is none."""
    wanted = millions_in(name)
    if wanted is None:
        return None
    sizes = {shape: size for shape in SHAPES if (size := millions_in(shape)) is not None}
    apart = {shape: max(size / wanted, wanted / size) for shape, size in sizes.items() if size and wanted}
    nearest = min(apart, key=lambda shape: apart[shape], default=None)
    return nearest if nearest is not None and apart[nearest] <= FARTHEST else None
