"""Frozen weights in four bits: what they stand for, products and gradients, and trainings with them."""

import gc
import json
import sys
import weakref

import pytest
import torch
from builders import ARCHITECTURES, DEVICE, GPU_IF_THERE, make_model, make_request, make_tokenizer
from torch.nn.functional import linear
from trainings import assert_same_weights, final_weights, train_rows, train_untimed
from transformers import AutoModelForCausalLM

from luffy.dry_run.models import model_shape
from luffy.errors import ConfigError, UserError
from luffy.models.forward import causal_lm
from luffy.models.four_bit import BYTES, FourBitLinear, loading_settings, matrix_kind, unpacked
from luffy.models.load import load_model
from luffy.models.products import separate
from luffy.rollout.native import NativeEngine
from luffy.rollout.policy_weights import PushCheck, adapter_tensors, tensors_of
from luffy.train.build_engines import serve
from luffy.train.weights import Export, load_policy

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytestmark = GPU_IF_THERE
LORA = {"rank": 4, "quantize": "nf4"}
BLOCK = 64
# Quantiles of the normal distribution, of the paper on QLoRA.
NF4 = torch.tensor(
    [-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
     0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0]
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model in float32."""
    folder = tmp_path_factory.mktemp("qwen2")
    make_model("qwen2").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def four_bit_layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, FourBitLinear)}


def test_each_block_of_a_weight_has_the_levels_of_the_paper(saved):
    original = dict(load_model(saved).named_parameters())
    layers = four_bit_layers(load_model(saved, device=str(DEVICE), four_bits=True))
    assert len(layers) == 3 * 7  # attention and MLP of each layer, not the head
    for name, layer in layers.items():
        before = original[f"{name}.weight"].detach().view(-1, BLOCK)
        after = unpacked(layer.weight).cpu().view(-1, BLOCK)
        most = before.abs().amax(dim=1, keepdim=True)
        scale = after.abs().amax(dim=1, keepdim=True)
        assert torch.all((scale / most - 1).abs() < 0.02)  # the scales are rounded to a byte
        nearest = NF4[(before[..., None] / most[..., None] - NF4).abs().argmin(dim=-1)]
        torch.testing.assert_close(after / scale, nearest, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapted", [True, False])
def test_products_and_gradients_are_those_of_the_unpacked_weight(saved, dtype, adapted):
    model = load_model(saved, str(dtype).removeprefix("torch."), str(DEVICE), four_bits=True)
    layer = model.model.layers[0].self_attn.q_proj
    weight, bias = unpacked(layer.weight).float(), layer.bias.float()
    if adapted:
        settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, settings)
        layer = causal_lm(model).model.layers[0].self_attn.q_proj
        weight = weight + layer.get_delta_weight("default").float()
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype).requires_grad_()
    (out,) = separate(x, [layer])
    expected = linear(x.float(), weight, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance * expected.abs().max().item(), rtol=0)
    steps = torch.linspace(-1, 2, out.numel(), device=DEVICE).view_as(out)
    through, reference = (torch.autograd.grad((y.float() * steps).sum(), x)[0].float() for y in (out, expected))
    torch.testing.assert_close(through, reference, atol=tolerance * reference.abs().max().item(), rtol=0)


def test_a_model_in_four_bits_takes_the_memory_that_is_estimated(saved):
    layers = four_bit_layers(load_model(saved, device=str(DEVICE), four_bits=True)).values()
    count = sum(layer.in_features * layer.out_features for layer in layers)
    states = [layer.weight.quant_state for layer in layers]
    held = [t for layer, s in zip(layers, states, strict=True) for t in (layer.weight, s.absmax, s.state2.absmax)]
    assert sum(t.numel() * t.element_size() for t in held) == pytest.approx(BYTES * count, rel=0.01)


def test_a_model_in_four_bits_that_is_let_go_of_is_freed_at_once(saved):
    model = load_model(saved, four_bits=True)
    weights = [weakref.ref(layer.weight) for layer in four_bit_layers(model).values()]
    gc.disable()
    try:
        del model
        assert not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


def test_the_engine_draws_from_the_distribution_that_is_trained(saved, make_config):
    cfg = make_config(model={"path": str(saved), "lora": LORA, "device": str(DEVICE)})
    model = load_policy(cfg.model, str(DEVICE))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    ids = (5, 6, 7)
    (got,) = NativeEngine(model).generate([make_request(ids, 12)])
    merged = AutoModelForCausalLM.from_config(causal_lm(model).config).to(DEVICE)
    merged.set_attn_implementation("eager")
    merged.load_state_dict(dict(tensors_of(model)), strict=False)  # the head is tied
    with torch.no_grad():
        whole = torch.tensor([[*ids, *got.token_ids.tolist()]], device=DEVICE)
        log_probs = merged(whole).logits[0].log_softmax(dim=-1)
    drawn = log_probs[2:-1].gather(1, whole[0, 3:, None])[:, 0].cpu()
    torch.testing.assert_close(got.log_probs.cpu(), drawn, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["rl", "sft"])
def test_adapters_learn_beside_weights_in_four_bits(make_config, method):
    changes = {"model": {"lora": LORA, "device": str(DEVICE)}, "optim": {"lr": 1e-2}}
    whole = make_config(name="whole", train={"steps": 2}, **changes)
    rows = train_untimed(whole, method=method)
    kl = [row["rollout/logprob_diff_mean"] for row in rows if "rollout/logprob_diff_mean" in row]
    assert all(value < 1e-4 for value in kl) and len(kl) == (2 if method == "rl" else 0)
    base, tuned = load_policy(whole.model, "cpu"), final_weights(whole)
    before = dict(tensors_of(base))
    assert {n for n in before if not torch.allclose(before[n], tuned[n], atol=1e-6)} == {
        f"{name.removeprefix('base_model.model.').removesuffix('.base_layer')}.weight" for name in four_bit_layers(base)
    }
    train_rows(make_config(name="half", train={"steps": 1}, **changes), method)
    resumed = make_config(name="half", train={"steps": 2}, **changes)
    train_rows(resumed, method)
    assert_same_weights(final_weights(resumed), tuned, tolerance=0 if DEVICE.type == "cpu" else 1e-5)


def test_rollouts_ahead_of_the_update_have_the_same_four_bits(make_config):
    model = {"lora": LORA, "device": str(DEVICE)}
    rows = train_rows(
        make_config(model=model, train={"steps": 3}, optim={"lr": 1e-7}, **{"async": {"max_staleness": 1}})
    )
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["rollout/logprob_diff_mean"] < 1e-4 for row in rows)


def test_a_push_to_another_engine_has_whole_matrices(saved, make_config):
    model = load_policy(make_config(model={"path": str(saved), "lora": LORA}).model, "cpu")
    PushCheck(model)(model, 1)
    assert matrix_kind(four_bit_layers(model)["base_model.model.model.layers.0.mlp.up_proj.base_layer"].weight) == (
        (128, 64), torch.float32
    )  # fmt: skip
    merged, bare = dict(tensors_of(model)), dict(tensors_of(model, merged=False))
    assert merged["model.layers.0.mlp.up_proj.weight"].shape == (128, 64)
    assert_same_weights(bare, merged, tolerance=1e-7)  # fresh adapters add nothing
    assert {tensor.dtype for tensor in adapter_tensors(model).values()} == {torch.float32}


@pytest.fixture
def quantized(saved, tmp_path, request):
    """A folder whose weights are in four bits already, with settings other than luffy's own."""
    settings = loading_settings(torch.float32)
    settings.bnb_4bit_use_double_quant = False
    settings.bnb_4bit_quant_storage = getattr(request, "param", torch.uint8)
    model = AutoModelForCausalLM.from_pretrained(saved, quantization_config=settings, device_map={"": str(DEVICE)})
    model.save_pretrained(tmp_path / "quantized")
    make_tokenizer().save_pretrained(tmp_path / "quantized")
    return tmp_path / "quantized"


def test_a_folder_in_four_bits_is_read_as_it_is(quantized, saved):
    original = load_model(saved)
    model = load_model(quantized, device=str(DEVICE), four_bits=True)
    layer = model.model.layers[0].mlp.up_proj
    far = (unpacked(layer.weight).cpu() - original.model.layers[0].mlp.up_proj.weight).abs().max()
    assert not layer.weight.quant_state.nested and 0 < far < 0.2
    with pytest.raises(UserError, match=r"quantized weights cannot be trained; .* with model\.lora\.quantize=nf4"):
        load_model(quantized)


def test_the_dry_run_knows_what_reads_quantized_weights(quantized, make_config):
    assert model_shape(make_config(model={"path": str(quantized), "lora": LORA})).four_bit > 0
    for lora in (None, {"rank": 4}):
        with pytest.raises(UserError, match="quantized weights cannot be trained"):
            model_shape(make_config(model={"path": str(quantized), "lora": lora}))


@pytest.mark.parametrize("quantized", [torch.uint8, torch.bfloat16], indirect=True)  # what the bits are stored as
def test_a_checkpoint_above_a_folder_in_four_bits_is_whole(quantized, make_config, tmp_path):
    model = load_policy(make_config(model={"path": str(quantized), "lora": LORA}).model, str(DEVICE))
    PushCheck(model)(model, 1)
    Export(model, make_tokenizer(), (1,), lora=True).write(tmp_path / "saved")
    found, expected = dict(load_model(tmp_path / "saved" / "model").named_parameters()), dict(tensors_of(model))
    assert all(torch.equal(found[name], expected[name].cpu()) for name in expected)


def test_a_server_is_not_started_with_weights_that_no_push_fits(quantized, make_config):
    cfg = make_config(model={"path": str(quantized), "lora": LORA}, rollout={"engine": "vllm"})
    with pytest.raises(ConfigError, match=r"^'model.path' has quantized weights, and a push has whole ones; serve "):
        serve(cfg, "127.0.0.1", 8000)


def test_weights_quantized_in_another_way_are_refused(quantized):
    file = quantized / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "fp4"
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantized in another way than bitsandbytes nf4; load the original"):
        load_model(quantized, four_bits=True)


def test_a_folder_without_a_model_is_described_as_it_is_otherwise(tmp_path):
    (tmp_path / "checkpoints" / "latest" / "model").mkdir(parents=True)
    for path, why in ((tmp_path / "none", "no such folder$"), (tmp_path, "a run folder; its newest model is")):
        with pytest.raises(UserError, match=why):
            load_model(path, four_bits=True)


def test_layers_that_lie_transposed_are_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(ARCHITECTURES, "gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4})
    make_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^transformer\.h\.0\.attn\.c_attn is a Conv1D, which cannot be in four bits"):
        load_model(tmp_path, four_bits=True)


def test_several_processes_and_a_missing_library_are_refused(make_config, saved, monkeypatch):
    with pytest.raises(ConfigError, match="'model.lora.quantize' is for one process, and launch is torchrun"):
        make_config(model={"lora": LORA, "dtype": "float32"}, launch="torchrun", parallel={"workers": 2})
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"need bitsandbytes; install it with: pip install '\.\[qlora\]'"):
        load_model(saved, four_bits=True)
