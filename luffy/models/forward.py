"""The forward pass the trainer and the engine share: flat tokens in, hidden states out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from luffy.errors import UserError
from luffy.models.attention import ATTENTION_NAME, LAYOUT_KEY, Layout
from luffy.models.fused import fused_decoder
from luffy.models.products import Products, summed
from luffy.types import NO_LIMIT

# Config fields that change logits after the head, with the value that leaves them alone.
LOGIT_CHANGES: dict[str, float | None] = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}
# These recompute the rotary frequencies from the longest position at hand, so a sequence's numbers
# would depend on its neighbours and cached keys would go stale.
MOVING_ROPES = ("dynamic", "longrope")
LAYER_KINDS = {"full_attention", "sliding_attention"}


def causal_lm(model: nn.Module) -> Any:
    """The `transformers` causal LM itself, also from inside a PEFT wrapper (adapters stay active)."""
    wrapper: Any = model
    if not hasattr(wrapper, "get_base_model"):
        return model
    if getattr(wrapper.active_peft_config, "is_prompt_learning", False):
        raise UserError("PEFT prompt learning adds virtual tokens, which luffy does not support: use LoRA")
    return wrapper.get_base_model()


def text_config(config: Any) -> Any:
    """The part of a config that speaks of tokens and layers; of a model for images and text it is an inner one."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def key_value_shape(config: Any) -> tuple[int, int]:
    """Heads of keys and values, and how wide one is."""
    config = text_config(config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(heads), int(width)


def max_positions(config: Any) -> int:
    """The model's context; ``NO_LIMIT`` where its config has none. With longrope it ends where the frequencies change:
    beyond, a sequence's numbers would depend on its neighbours. Those of a dynamic rope change after the context."""
    config = text_config(config)
    longest: int = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    fixed = [rope.get("original_max_position_embeddings") for rope in ropes(config) if rope["rope_type"] == "longrope"]
    return min([longest, *filter(None, fixed)])


def ropes(config: Any) -> list[dict[str, Any]]:
    """Parameters of the rotary embedding: one set, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in (found, *found.values()) if isinstance(rope, dict) and "rope_type" in rope]


def use_luffy_attention(model: nn.Module) -> None:
    """Point the model at our attention function, after checking that it is one we compute rightly."""
    causal = causal_lm(model)
    if causal.config._attn_implementation == ATTENTION_NAME:
        return
    check_supported(causal)
    causal.set_attn_implementation(ATTENTION_NAME)
    if causal.config._attn_implementation != ATTENTION_NAME:
        raise UserError(f"{type(causal).__name__} does not let its attention be chosen, so luffy cannot run it")


def check_supported(causal: Any) -> None:
    """Errors for architectures whose attention or logits we would get wrong."""
    name, config = type(causal).__name__, text_config(causal.config)
    for field, neutral in LOGIT_CHANGES.items():
        value = getattr(config, field, neutral)
        if value not in (neutral, None):
            raise UserError(f"{name} changes its logits after the head ({field}={value}), which luffy does not support")
    for rope in ropes(config):
        if rope["rope_type"] in MOVING_ROPES:
            raise UserError(f"{name} uses rope_type '{rope['rope_type']}', whose frequencies depend on the batch")
    strange = set(getattr(config, "layer_types", None) or ()) - LAYER_KINDS
    if strange:
        raise UserError(f"{name} has layers of kind {', '.join(sorted(strange))}; luffy supports only full and sliding")


def forward_hidden(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor, layout: Layout, products: Products = summed
) -> Tensor:
    """Hidden states [N, H] of N tokens, before the vocabulary head. ``products``: how linear layers are computed where
    the model has a fused form; the trainer leaves it, so that all its passes round alike."""
    use_luffy_attention(model)
    causal = causal_lm(model)
    layout.calls = 0
    if (fused := fused_decoder(causal)) is not None:
        return fused(input_ids, position_ids, layout, products)
    backbone = getattr(causal, causal.base_model_prefix)
    extra = {LAYOUT_KEY: layout}
    output = backbone(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, **extra)
    layers = text_config(causal.config).num_hidden_layers
    if layout.calls != layers:
        raise UserError(
            f"{type(causal).__name__} called luffy's attention {layout.calls} times for {layers} layers:"
            " it does not use the attention interface of transformers, so luffy cannot run it"
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def head_weight_bias(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias of the vocabulary head."""
    head = causal_lm(model).get_output_embeddings()
    if not isinstance(head, nn.Linear):
        kind = type(head).__module__ + "." + type(head).__name__
        raise UserError(f"the vocabulary head is a {kind}, not a plain linear layer: leave lm_head out of the adapters")
    return head.weight, head.bias


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no gradient checkpointing), then every module as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
