"""What leaves the trainer for another engine, and what is refused before anything leaves."""

import shutil

import pytest
import torch
from builders import ARCHITECTURES, make_model

from luffy.errors import UserError
from luffy.rollout.policy_weights import (
    PushCheck,
    adapter_tensors,
    check_adapters_alone,
    checkpoint_weights,
    tensors_of,
)
from luffy.rollout.vllm.transfer import write_weights
from luffy.rollout.vllm.worker_extension import not_filled, noting_loaded, tensors_in


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])  # tied and untied
def test_names_and_tensors_are_those_of_the_saved_checkpoint(architecture, tmp_path):
    model = make_model(architecture)
    model.save_pretrained(tmp_path)
    saved = dict(tensors_in(tmp_path.glob("*.safetensors")))
    pushed = dict(tensors_of(model))
    assert pushed.keys() == saved.keys()
    assert all(torch.equal(pushed[name], saved[name]) for name in saved)


def test_adapters_are_merged_without_touching_the_policy():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_model("qwen2"), config)
    before = [parameter.clone() for parameter in model.parameters()]
    pushed = dict(tensors_of(model))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    merged = model.merge_and_unload().state_dict()
    assert pushed.keys() == merged.keys() - {"lm_head.weight"}  # tied
    for name, tensor in pushed.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5)
    assert "model.layers.0.self_attn.q_proj.bias" in pushed
    PushCheck(make_model("qwen2"))(model, 1)


def test_adapters_of_fused_experts_are_merged_under_the_experts_names(monkeypatch):
    """Peft puts one layer around another where it adapts several parameters of a module."""
    peft = pytest.importorskip("peft")
    monkeypatch.setitem(ARCHITECTURES, "mixtral", {"num_local_experts": 4})
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(make_model("mixtral"), config)
    PushCheck(make_model("mixtral"))(model, 1)
    pushed, merged = dict(tensors_of(model)), model.merge_and_unload().state_dict()
    assert pushed.keys() == merged.keys() and any("experts" in name for name in pushed)
    for name, tensor in pushed.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-5, rtol=1e-5)


def test_adapters_alone_are_peft_s_with_their_factor_and_leave_the_weights_below():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    plain = dict(tensors_of(make_model("llama")))
    model = peft.get_peft_model(make_model("llama"), config)
    below, alone = dict(tensors_of(model, merged=False)), adapter_tensors(model)
    assert below.keys() == plain.keys() and all(torch.equal(below[name], plain[name]) for name in plain)
    saved = peft.get_peft_model_state_dict(model)
    assert alone.keys() == saved.keys()
    for name, tensor in alone.items():
        assert torch.equal(tensor, saved[name] * (3 if "lora_B" in name else 1))
    check_adapters_alone(model)
    head = peft.get_peft_model(make_model("qwen3"), peft.LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(UserError, match=r"^vLLM takes no adapters of lm_head: .* rollout.vllm.adapters=merged$"):
        check_adapters_alone(head)


def test_a_folder_holds_everything_in_parts_and_is_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr("luffy.rollout.vllm.transfer.SHARD_BYTES", 60_000)
    model = make_model("llama")
    with write_weights(model, tmp_path / "deep" / "er", 3) as folder:
        files = sorted(folder.iterdir())
        assert len(files) > 3
        read = dict(tensors_in(files))
        expected = dict(tensors_of(model))
        assert read.keys() == expected.keys() and all(torch.equal(read[n], expected[n]) for n in read)
    assert not list(tmp_path.rglob("weights-*"))


def test_files_of_a_killed_writer_are_removed_by_the_next_push(tmp_path):
    """Its lock died with it, so a copy of its folder stands for what it left."""
    model = make_model("llama")
    with write_weights(model, tmp_path, 3) as writing:
        left, elsewhere = writing.with_name("weights-000002-killed"), tmp_path / "another-machine" / writing.name
        shutil.copytree(writing, left)
        shutil.copytree(writing, elsewhere)
        with write_weights(model, tmp_path, 3) as other:
            assert set(tmp_path.rglob("weights-*")) == {writing, other, left, elsewhere}
    with write_weights(model, tmp_path, 4) as writing:
        assert set(tmp_path.rglob("weights-*")) == {writing, elsewhere}


def spoil(model, kind):
    layer = model.model.layers[1].mlp
    if kind == "shape":
        layer.up_proj.weight = torch.nn.Parameter(torch.zeros(5, 64))
    elif kind == "missing":
        del layer.up_proj.weight
    elif kind == "unknown":
        layer.extra = torch.nn.Linear(2, 2)
    else:
        with torch.no_grad():
            layer.up_proj.weight[0, 0] = float(kind)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("nan", FloatingPointError, r"version 7 not pushed: 1 tensor \(model.layers.1.mlp.up_proj.weight\) with NaN"),
        ("-inf", FloatingPointError, "NaN or infinity$"),
        ("shape", UserError, r"up_proj.weight is \[5, 64\] and must be \[128, 64\]"),
        ("missing", UserError, r"1 tensor \(model.layers.1.mlp.up_proj.weight\) missing"),
        ("unknown", UserError, r"2 tensors \(model.layers.1.mlp.extra.bias, .*\) unknown to the model's config"),
    ],
)
def test_a_bad_push_is_refused_with_what_is_wrong(kind, error, message):
    model = make_model("llama")
    check = PushCheck(model)
    check(model, 6)
    spoil(model, kind)
    with pytest.raises(error, match=message) as caught:
        check(model, 7)
    assert "\n" not in str(caught.value)


def test_nothing_is_computed_before_it_is_asked_for():
    weights = checkpoint_weights(make_model("llama"))
    assert len(weights) == 1 + 3 * 9 + 1 and all(weight.layer is None for weight in weights)


class Loader(torch.nn.Module):
    """As a model of vLLM: some tell what they loaded, some do not."""

    def __init__(self, tells):
        super().__init__()
        self.a, self.b, self.tells = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), tells

    def load_weights(self, weights):
        names = {name for name, _ in weights}
        return names if self.tells else None


@pytest.mark.parametrize(
    ("tells", "known"), [(True, {"a.weight"}), (False, {"a.weight", "a.bias", "b.weight", "b.bias"})]
)
def test_which_parameters_were_loaded(tells, known):
    model = Loader(tells)
    with noting_loaded(model) as loaded:
        model.load_weights([("a.weight", torch.zeros(1, 1))])
    assert loaded == known and "load_weights" not in vars(model)


def test_a_tied_head_is_filled_by_its_other_name():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("embed", "head", "other")})
    model["head"].weight = torch.nn.Parameter(model["embed"].weight.detach())  # another object, the same memory
    assert not_filled(model, {"embed.weight"}) == ["other.weight"]
    assert not_filled(model, {"embed.weight", "other.weight"}) == []


def test_a_layer_below_adapters_is_filled_under_either_name():
    model = torch.nn.ModuleDict({"q": torch.nn.ModuleDict({"base_layer": torch.nn.Linear(2, 2, bias=False)})})
    assert not_filled(model, {"q.weight"}) == not_filled(model, {"q.base_layer.weight"}) == []
    assert not_filled(model, set()) == ["q.weight"]
