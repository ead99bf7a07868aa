"""The forward pass the trainer and the engine share: flat tokens in, hidden states out; and the fused form
of the families that have one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from luffy.errors import UserError
from luffy.kernels import kernels_serve
from luffy.models.attention import ATTENTION_NAME, LAYOUT_KEY, Layout
from luffy.models.products import Fp8Products, Products, merge_weights, merged, merged_gates, summed
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


# Families whose layers are exactly: norm, q/k/v, rotary, attention, o, sum, norm, gated MLP, sum.
FAMILIES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"}

_fused: weakref.WeakKeyDictionary[nn.Module, FusedDecoder | None] = weakref.WeakKeyDictionary()


def fused_decoder(causal: Any) -> FusedDecoder | None:
    """The fused form of a model, if it has one where it now lies."""
    if causal not in _fused:
        _fused[causal] = FusedDecoder(causal) if has_fused_form(causal) else None
    decoder = _fused[causal]
    if decoder is None or not kernels_serve(causal.get_input_embeddings().weight.device):
        return None
    # Someone who hooks into the layers (sharding, offloading, probes) wants the modules themselves to run.
    return None if decoder.is_hooked() else decoder


def has_fused_form(causal: Any) -> bool:
    """Whether the model has a fused form; with attention dropout the modules run, whose attention refuses it in
    training."""
    if type(causal).__name__ not in FAMILIES:
        return False
    config = causal.config
    return config.hidden_act in ("silu", "swish") and not getattr(config, "attention_dropout", 0.0)


class FusedDecoder:
    """The decoder layers of the Llama family with one kernel where its modules launch several. Weights are those of the
    model's own modules; norms, residual sums, rotary embedding and activation are ours, and linear layers are computed
    by `luffy.models.products`. The result is that of the modules up to the order of sums and the rounding of
    adapters."""

    def __init__(self, causal: Any) -> None:
        # The model holds everything; a strong reference here would keep it alive as its own dictionary key.
        self._backbone = weakref.ref(getattr(causal, causal.base_model_prefix))

    def is_hooked(self) -> bool:
        backbone: Any = self._backbone()
        return any(module._forward_hooks or module._forward_pre_hooks for module in (backbone, *backbone.layers))

    @property
    def layers(self) -> Any:
        backbone: Any = self._backbone()
        return backbone.layers

    def merge_weights(self) -> None:
        merge_weights(self.layers)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, products: Products = summed) -> Tensor:
        """Hidden states [N, H] of N tokens, before the vocabulary head."""
        from luffy.kernels.elementwise import rotary_angles

        backbone: Any = self._backbone()
        delta, residual = backbone.embed_tokens(input_ids), None
        rotary = backbone.rotary_emb
        angles = rotary_angles(position_ids, rotary.inv_freq, rotary.attention_scaling, delta.dtype)
        remake = backbone.gradient_checkpointing and backbone.training and torch.is_grad_enabled()
        for layer in backbone.layers:
            inputs = (layer, delta, residual, angles, layout, products)
            delta, residual = checkpoint(_layer, *inputs, use_reentrant=False) if remake else _layer(*inputs)
        return _normed(backbone.norm, delta, residual)[0]


def _normed(norm: Any, x: Tensor, residual: Tensor | None, float8: bool = False) -> tuple[Any, Tensor]:
    from luffy.kernels.norm import add_rms_norm, add_rms_norm_quantized

    function = add_rms_norm_quantized if float8 else add_rms_norm
    return function(x, residual, norm.weight, norm.variance_epsilon)


def _layer(
    layer: Any,
    delta: Tensor,
    residual: Tensor | None,
    angles: tuple[Tensor, Tensor],
    layout: Layout,
    products: Products,
) -> tuple[Tensor, Tensor]:
    """The layer's contribution, and the residual stream to which the next norm adds it."""
    from luffy.kernels.elementwise import swiglu, swiglu_quantized

    attention, mlp = layer.self_attn, layer.mlp
    projections, gates, down = (
        (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)
    )  # fmt: skip
    # Quantized where they are made, for products that would quantize them.
    float8 = products.takes_float8 if isinstance(products, Fp8Products) else lambda group: False
    x, residual = _normed(layer.input_layernorm, delta, residual, float8(projections))
    attended = _attention(attention, products(x, projections), angles, layout, products)
    x, residual = _normed(layer.post_attention_layernorm, attended, residual, float8(gates))
    activation: Any = swiglu_quantized if float8(down) else swiglu
    inner = merged_gates(x, gates) if products is merged else None
    (out,) = products(activation(*products(x, gates)) if inner is None else inner, down)
    return out, residual


def _attention(
    attention: Any, projected: Sequence[Tensor], angles: tuple[Tensor, Tensor], layout: Layout, products: Products
) -> Tensor:
    """Attention output for projected queries, keys and values."""
    from luffy.kernels.elementwise import rotate

    width = attention.head_dim
    q, k, v = (flat.view(len(flat), -1, width) for flat in projected)
    if hasattr(attention, "q_norm"):
        q, k = _head_norm(attention.q_norm, q), _head_norm(attention.k_norm, k)
    layout.calls += 1
    place = (attention.layer_idx, attention.scaling, _window(attention))
    if hasattr(layout, "rotate_and_attend"):
        out = layout.rotate_and_attend(q, k, v, *angles, *place)
    else:
        layer, scale, window = place
        # Rows of a merged product lie apart, which not every attention kernel takes.
        out = layout.attend(layer, rotate(q, *angles), rotate(k, *angles), v.contiguous(), scale, window)
    (out,) = products(out.reshape(len(q), -1), (attention.o_proj,))
    return out


def _head_norm(norm: Any, heads: Tensor) -> Tensor:
    return _normed(norm, heads.reshape(-1, heads.shape[-1]), None)[0].view(heads.shape)


def _window(attention: Any) -> int | None:
    """Qwen's layers know whether they slide, Mistral's always do when there is a window, Llama's never."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    return attention.config.sliding_window if type(attention).__name__.startswith("Mistral") else None
