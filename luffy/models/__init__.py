"""Hugging Face models as luffy runs them: one attention function, one forward pass, safe loading."""

from luffy.models.attention import DecodeLayout, PackedLayout
from luffy.models.forward import forward_hidden, head_weight_bias, use_luffy_attention
from luffy.models.load import drop_padding_tokens, eos_ids, load_model, load_tokenizer, token_count

__all__ = [
    "DecodeLayout",
    "PackedLayout",
    "drop_padding_tokens",
    "eos_ids",
    "forward_hidden",
    "head_weight_bias",
    "load_model",
    "load_tokenizer",
    "token_count",
    "use_luffy_attention",
]
