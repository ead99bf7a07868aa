"""Frozen weights in four bits (QLoRA): NF4 with double quantization, by bitsandbytes.

A product turns the four bits into the model's precision, multiplies and forgets them. Rollouts and updates both do so,
so they see the same weights.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.errors import UserError, how_to_install

BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # per weight: four bits, a byte for each 64 weights, a float32 for each 256 bytes
KIND = ("bitsandbytes", "nf4")  # of files that are quantized already

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it misses kernels that luffy does not use


class FourBitLinear(nn.Linear):
    """A linear layer with a frozen weight in four bits, made of one of bitsandbytes."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        layer.weight.data = layer.weight.data.view(torch.uint8)  # a file may hold the bits as meaningless floats
        layer.weight.quant_state.dtype = dtype
        layer.weight.module = None  # it names its layer, and the two would keep each other

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self.weight, self.bias)
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, unpacked(weight), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] @ unpacked(ctx.weight), None, None


def unpacked(weight: Tensor) -> Tensor:
    """The matrix that a weight stands for: itself, unless it is in four bits."""
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    matrix: Tensor = dequantize_4bit(weight.data, state)
    return matrix


def matrix_kind(weight: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the matrix that a weight stands for."""
    whole: Any = getattr(weight, "quant_state", None) or weight
    return tuple(whole.shape), whole.dtype


def loading_settings(dtype: torch.dtype) -> Any:
    """What makes `transformers` quantize the linear layers of a decoder as it reads them."""
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError:
        raise UserError(f"four-bit weights need bitsandbytes; install it with: {how_to_install('qlora')}") from None
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def keep_four_bits(model: Any, dtype: torch.dtype) -> None:
    """Replace the layers of bitsandbytes by those of this module, and let the model be saved like a plain one."""
    from bitsandbytes.nn import Linear4bit

    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            kind = getattr(layer, "source_cls", nn.Linear)  # what `transformers` replaced
            if not issubclass(kind, nn.Linear):
                raise UserError(
                    f"{name} is a {kind.__name__}, which cannot be in four bits: leave out model.lora.quantize"
                )
            owner, _, field = name.rpartition(".")
            setattr(model.get_submodule(owner), field, FourBitLinear(layer, dtype))
    # `save_pretrained` undoes each step in which a file was read, and cannot undo the reading of four bits.
    steps = getattr(model, "_weight_conversions", ())
    model._weight_conversions = [step for step in steps if not _reads_four_bits(step)]


def _reads_four_bits(conversion: Any) -> bool:
    return any("bitsandbytes" in type(each).__module__ for each in getattr(conversion, "operations", ()))
