"""Random models of known shapes. Speed depends on the shape alone; nothing is learned from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from luffy.errors import UserError
from luffy.models.forward import use_luffy_attention
from luffy.models.four_bit import matrix_kind
from luffy.models.load import DTYPES, DtypeName, load_model, say_slow_dtype
from luffy.models.shapes import SHAPES, shape_config


def random_model(shape: str, dtype: DtypeName, device: str) -> Any:
    if shape not in SHAPES:
        raise UserError(f"shape '{shape}' is unknown: use one of {', '.join(SHAPES)}, or --model with a folder")
    say_slow_dtype(dtype, device)
    config = shape_config(shape)
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
    """Of the matrices that the weights stand for, also where they lie there in four bits."""
    return sum(math.prod(matrix_kind(parameter)[0]) for parameter in model.parameters())
