"""Random models of known shapes. Speed depends on the shape alone; nothing is learned from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.errors import UserError
from luffy.models.forward import use_luffy_attention
from luffy.models.load import DTYPES, DtypeName, load_model, say_slow_dtype

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True},
    "30m": {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
            "intermediate_size": 1024, "vocab_size": 32000, "tie_word_embeddings": True},
    "qwen2-0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                   "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2-1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
                   "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2-7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                 "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip


def random_model(shape: str, dtype: DtypeName, device: str) -> Any:
    if shape not in SHAPES:
        raise UserError(f"shape '{shape}' is unknown: use one of {', '.join(SHAPES)}, or --model with a folder")
    say_slow_dtype(dtype, device)
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=32768, eos_token_id=SHAPES[shape]["vocab_size"] - 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    use_luffy_attention(model)
    return model.eval()


def model_of(shape: str, path: Path | None, dtype: DtypeName, device: str) -> nn.Module:
    return random_model(shape, dtype, device) if path is None else load_model(path, dtype, device)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
