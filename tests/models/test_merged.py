"""Merged products: the numbers of the separate ones, from the same memory, and nobody else notices."""

import copy
import hashlib

import pytest
import torch
import torch.distributed as dist
from builders import ARCHITECTURES, REQUESTS, make_small_model
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from luffy.distributed.replica import on_host
from luffy.models.attention import PackedLayout
from luffy.models.forward import forward_hidden, fused_decoder
from luffy.models.products import merge_weights, merged, separate
from luffy.rollout import NativeEngine
from luffy.rollout.policy_weights import tensors_of

pytestmark = pytest.mark.usefixtures("fast_kernels")


def layers_of(model):
    return model.model.layers


def merged_blocks(model):
    """How many memories the weights of each layer's attention and MLP lie in: (q, k, v), (gate, up), biases."""
    counts = []
    for layer in layers_of(model):
        attention, mlp = layer.self_attn, layer.mlp
        groups = [(attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)]
        counts.append([len({part.weight.untyped_storage().data_ptr() for part in group}) for group in groups])
        if attention.q_proj.bias is not None:
            counts[-1].append(len({part.bias.untyped_storage().data_ptr() for part in groups[0]}))
    assert all(count == counts[0] for count in counts)
    return counts[0]


def bytes_held(model):
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


def hidden(model, products, count=11):
    layout = PackedLayout([count - 4, 4])
    with torch.no_grad():
        return forward_hidden(model, torch.arange(count) + 3, layout.position_ids, layout, products)


def responses(model, merged=True):
    return NativeEngine(model, decoding="pages", max_context=128, merged=merged).generate(REQUESTS)


def assert_same_responses(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        torch.testing.assert_close(mine.log_probs, other.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_merged_products_are_the_separate_ones(architecture):
    model = make_small_model(architecture)
    before = bytes_held(model)
    apart, expected = hidden(model, separate), responses(model, merged=False)
    assert set(merged_blocks(model)) & {1} == set()
    assert_same_responses(responses(model), expected)
    assert set(merged_blocks(model)) == {1} and bytes_held(model) == before
    assert torch.equal(hidden(model, separate), apart)  # the modules' own products, to the bit
    # One product may add in another order than two: float32 rounding and no more.
    torch.testing.assert_close(hidden(model, merged), apart, rtol=1e-5, atol=1e-5)


def test_one_product_for_each_group(monkeypatch):
    model = make_small_model()
    merge_weights(layers_of(model))
    widths = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b=None: widths.append(len(w)) or linear(x, w, b))
    hidden(model, merged)
    assert widths == [32 + 16 + 16, 32, 2 * 48, 32] * 2  # q+k+v, o, gate+up, down
    widths.clear()
    hidden(model, separate)
    assert widths == [32, 16, 16, 32, 48, 48, 32] * 2


def test_few_rows_are_multiplied_and_activated_at_once(monkeypatch):
    """The same numbers; layers that are more than a product run as ever."""
    gated = pytest.importorskip("luffy.kernels.gated", exc_type=ImportError)  # Triton
    model = make_small_model()
    expected = hidden(model, separate)
    merge_weights(layers_of(model))
    used = []
    monkeypatch.setattr(gated, "is_faster", lambda x, columns: used.append(columns) or True)
    for name in ("COLUMNS", "DEPTH"):
        monkeypatch.setattr(gated, name, 16)
    torch.testing.assert_close(hidden(model, merged), expected, rtol=1e-5, atol=1e-5)
    assert used == [48] * len(layers_of(model))
    torch.testing.assert_close(hidden(model, separate), expected, rtol=1e-5, atol=1e-5)
    layers_of(model)[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(hidden(model, merged), expected, rtol=1e-5, atol=1e-5)
    assert len(used) == 2 * len(layers_of(model)) - 1


def test_gradients_and_updates_do_not_notice():
    """Bit for bit the same training, and the engine sees each update without being told."""
    apart, model = make_small_model().train(), make_small_model().train()
    merge_weights(layers_of(model))
    trained = []
    for each in (apart, model):
        adam = torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(3):
            layout = PackedLayout([7, 4])
            forward_hidden(each, torch.arange(11) + 3, layout.position_ids, layout).square().sum().backward()
            adam.step()
            adam.zero_grad()
        trained.append(dict(each.named_parameters()))
    assert all(torch.equal(p, trained[1][name]) for name, p in trained[0].items())
    assert set(merged_blocks(model)) == {1} and set(merged_blocks(apart)) != {1}
    assert_same_responses(responses(model), responses(apart, merged=False))


def test_a_checkpoint_of_merged_weights_is_the_same_file(tmp_path):
    model = make_small_model("llama")
    model.save_pretrained(tmp_path / "apart")
    merge_weights(layers_of(model))
    model.save_pretrained(tmp_path / "merged")
    model.save_pretrained(tmp_path / "host", state_dict=on_host(model))
    files = [tmp_path / name / "model.safetensors" for name in ("apart", "merged", "host")]
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files}) == 1
    again = type(model).from_pretrained(tmp_path / "merged")
    assert_same_responses(responses(again), responses(model))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_push_of_merged_weights_is_whole(tmp_path):
    model = make_small_model()
    save_file({name: p.detach() for name, p in model.named_parameters()}, tmp_path / "apart")
    merge_weights(layers_of(model))
    save_file(dict(tensors_of(model)), tmp_path / "merged")
    assert (tmp_path / "apart").read_bytes() == (tmp_path / "merged").read_bytes()
    others = {name: value + 1 for name, value in load_file(tmp_path / "apart").items()}
    model.load_state_dict(others, strict=False)
    assert set(merged_blocks(model)) == {1}
    assert all(torch.equal(p, others[name]) for name, p in model.named_parameters())


def test_weights_that_were_moved_are_merged_again():
    model = make_small_model()
    expected = responses(model, merged=False)
    engine = NativeEngine(model, decoding="pages", max_context=128, merged=True)
    for _ in range(2):
        assert_same_responses(engine.generate(REQUESTS), expected)
        assert set(merged_blocks(model)) == {1}
        model.double().float()
        assert set(merged_blocks(model)) != {1}


def test_a_copy_has_weights_of_its_own():
    model = make_small_model()
    merge_weights(layers_of(model))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert all(p.abs().sum() > 0 for p in layers_of(model).parameters())
    merge_weights(layers_of(copied))
    assert set(merged_blocks(copied)) == {1}


def test_adapted_layers_keep_their_own_products():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(make_small_model("llama"), settings).eval()
    expected = responses(model, merged=False)
    assert_same_responses(responses(model), expected)
    for layer in layers_of(model.get_base_model()):
        assert layer.mlp.gate_proj.weight.untyped_storage().data_ptr() == (
            layer.mlp.up_proj.weight.untyped_storage().data_ptr()
        )
        assert layer.self_attn.q_proj.weight.untyped_storage().nbytes() == 32 * 32 * 4  # alone in its memory


def test_a_hooked_projection_runs_itself():
    model, calls = make_small_model(), []
    expected = hidden(model, separate)
    merge_weights(layers_of(model))
    handle = layers_of(model)[0].self_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(hidden(model, merged), expected, rtol=1e-5, atol=1e-5)
    assert calls == [1]
    handle.remove()


def test_weights_that_do_not_fit_together_stay_apart():
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 2}
    model = make_small_model("qwen3", hidden_size=15, intermediate_size=45, **heads)
    merge_weights(layers_of(model))
    assert merged_blocks(model) == [3, 2]  # 6 rows of 15 floats end where no 16 bytes begin
    assert_same_responses(responses(model), responses(model, merged=False))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_weights_stay_apart(one_rank):
    model = make_small_model()
    for layer in layers_of(model):
        fully_shard(layer, mesh=one_rank)
    before = [p.to_local().data_ptr() for p in layers_of(model).parameters()]
    assert fused_decoder(model) is None  # its hooks must run
    merge_weights(layers_of(model))
    assert [p.to_local().data_ptr() for p in layers_of(model).parameters()] == before
