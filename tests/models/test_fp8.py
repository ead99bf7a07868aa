"""Rollouts in float8, emulated on a CPU: what is drawn, scored and refused. The products themselves: tests/gpu."""

import math

import pytest
import torch
from builders import ARCHITECTURES, REQUESTS, make_small_model

from luffy.config import Config
from luffy.errors import ConfigError, UserError
from luffy.models.attention import PackedLayout
from luffy.models.forward import forward_hidden, head_weight_bias
from luffy.models.products import Fp8Products, fp8_fault, merge_weights, separate
from luffy.rollout import NativeEngine
from luffy.schema import build

pytestmark = pytest.mark.usefixtures("fast_kernels")


def fp8_engine(model):
    return NativeEngine(model, decoding="pages", max_context=128, precision="fp8")


def quantized(model):
    products = Fp8Products()
    products.refresh(model.model.layers)
    return products


def scored_in_float8(model, request, completion, products):
    """Log-probs of a completion by one pass over the whole sequence."""
    ids = torch.tensor([*request.prompt_ids, *completion.token_ids.tolist()])
    layout = PackedLayout([len(ids)])
    with torch.no_grad():
        hidden = forward_hidden(model, ids, layout.position_ids, layout, products)
        logits = torch.nn.functional.linear(hidden, *head_weight_bias(model))
    rows = logits[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
    return rows.gather(1, completion.token_ids[:, None])[:, 0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_are_those_of_the_quantized_model(architecture):
    model = make_small_model(architecture)
    completions = fp8_engine(model).generate(REQUESTS)
    products = quantized(model)
    pairs = list(zip(REQUESTS, completions, strict=True))
    for request, completion in pairs:
        assert (completion.log_probs - scored_in_float8(model, request, completion, products)).abs().max() < 1e-4
    exact = torch.cat([scored_in_float8(model, request, c, separate) - c.log_probs for request, c in pairs])
    assert 0.001 < exact.abs().mean() < 0.5  # the model itself is another one, and not far


def test_a_quantized_product_is_near_the_exact_one():
    """Rounding to 3 bits behind the point is at most 1/16 off in each factor, and errors of many terms cancel."""
    model = make_small_model(hidden_size=128, intermediate_size=256)
    group = (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj)
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    parts = quantized(model)(x, group)
    for part, linear in zip(parts, group, strict=True):
        exact = linear(x)
        assert (part - exact).norm() < 0.05 * exact.norm()
    x[3] = 0
    assert not any(part[3].any() for part in quantized(model)(x, group))


def test_every_call_sees_the_weights_of_now_at_the_same_place():
    model = make_small_model()
    engine = fp8_engine(model)
    before = engine.generate(REQUESTS)
    places = [copy.weight.data_ptr() for copy in engine._products._copies.values()]
    assert len(places) == 2 * 4 and engine.metrics()["rollout/quantize_s"].value > 0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    after = engine.generate(REQUESTS)
    assert [copy.weight.data_ptr() for copy in engine._products._copies.values()] == places
    expected = fp8_engine(model).generate(REQUESTS)
    assert [c.token_ids.tolist() for c in after] == [c.token_ids.tolist() for c in expected]
    assert [c.token_ids.tolist() for c in after] != [c.token_ids.tolist() for c in before]
    assert engine.metrics()["rollout/quantize_s"].value > 0 and engine.metrics()["rollout/quantize_s"].value == 0


def test_the_copy_is_one_byte_a_weight_and_the_model_is_left_alone():
    model = make_small_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    products = quantized(model)
    merge_weights(model.model.layers)
    copies = products._copies.values()
    assert {copy.weight.dtype for copy in copies} == {torch.float8_e4m3fn}
    linear = sum(p.numel() for name, p in model.named_parameters() if "proj.weight" in name)
    assert sum(copy.weight.nbytes for copy in copies) == linear
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_sizes_that_the_product_does_not_take_stay_as_they_are():
    model = make_small_model(
        "llama", intermediate_size=40
    )  # 80 columns of gate and up are 5 times 16; 40 of down are not
    assert len(quantized(model)._copies) == 2 * 3 and fp8_fault(model.model.layers) is None
    assert all(math.isfinite(value) for c in fp8_engine(model).generate(REQUESTS) for value in c.log_probs.tolist())
    odd = make_small_model("llama", hidden_size=40, num_attention_heads=4, num_key_value_heads=4)
    assert "no plain linear layers" in fp8_fault(odd.model.layers)


def test_refused_where_it_cannot_be():
    with pytest.raises(UserError, match=r"no rollouts in fp8 \(rollout.precision\): that needs an NVIDIA GPU"):
        NativeEngine(make_small_model(), precision="fp8")
    fp8 = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "rollout": {"precision": "fp8"}}
    assert build(Config, fp8).rollout.precision == "fp8"
    for change, message in [
        ({"rollout": {"precision": "fp8", "engine": "vllm"}}, "is the native engine's and 'rollout.engine' is vllm"),
        ({"model": {"path": "m", "lora": {"rank": 4}}}, "adapters are not quantized"),
        (
            {"rollout": {"precision": "fp8", "offpolicy_guidance": {"enable": True, "model_path": "m"}}},
            "token overrides compare exact probabilities",
        ),
        ({"rollout": {"precision": "int8"}}, "precision"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build(Config, {**fp8, **change})
