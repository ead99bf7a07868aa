"""Loading: what is right loads, what is wrong is one line."""

import json
import os
import types
import warnings

import numpy as np
import pytest
import torch
from builders import make_model
from children import in_child
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from luffy.errors import UserError
from luffy.models import load
from luffy.models.attention import PackedLayout
from luffy.models.forward import forward_hidden
from luffy.models.load import drop_padding_tokens, eos_ids, load_model, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(message: str, path, **kwargs) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_model(path, **kwargs)
    assert "\n" not in str(caught.value)


def test_a_saved_model_comes_back_in_the_asked_dtype_ready_to_run(folder):
    model = load_model(folder)
    original = make_model("llama")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), original.parameters(), strict=True))
    half = load_model(folder, dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    layout = PackedLayout((3,))
    assert forward_hidden(half, torch.tensor([4, 5, 6]), layout.position_ids, layout).shape == (3, 64)


@pytest.mark.parametrize(("fast", "dtype", "device", "said"), [
    (False, "bfloat16", "cpu", True), (True, "bfloat16", "cpu", False), (False, "float32", "cpu", False),
    (False, "bfloat16", "cuda", False),
])  # fmt: skip
def test_a_cpu_without_bfloat16_is_told_to_use_float32(monkeypatch, fast, dtype, device, said):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    assert load.slow_dtype(dtype, device).endswith("use float32") == said
    assert bool(load.slow_dtype(dtype, device)) == said


def test_on_such_a_cpu_one_line_comes_and_no_stack_of_torch(folder):
    logged, warned = in_child(load_twice_and_run, folder)
    assert len(logged) == 1 and logged[0].endswith("use float32") and "\n" not in logged[0]
    assert warned == []


def load_twice_and_run(folder):
    """In a child: what is logged and warned."""
    logged, layout = [], PackedLayout((3,))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        patch.setattr(load.logger, "warning", logged.append)
        load._say_once.cache_clear()  # another job of this child may have said it
        for _ in range(2):
            half = load_model(folder, dtype="bfloat16")
            forward_hidden(half, torch.tensor([4, 5, 6]), layout.position_ids, layout)
        load._say_once.cache_clear()
    return logged, [str(w.message)[:80] for w in warned if "mkldnn" in str(w.message)]


def test_saving_again_works_and_remembers_no_attention_name(folder, tmp_path):
    load_model(folder).save_pretrained(tmp_path / "again")
    assert "luffy" not in (tmp_path / "again" / "config.json").read_text()
    load_model(tmp_path / "again")


def test_a_missing_folder_a_file_and_a_folder_without_config(tmp_path):
    refused("no such folder", tmp_path / "nowhere")
    refused("no such folder", "./nowhere")
    refused("no such file", tmp_path / "nowhere.gguf")
    (tmp_path / "notes.txt").write_text("x")
    refused("is a file", tmp_path / "notes.txt")
    refused(r"no config\.json", tmp_path)


def test_folders_beside_the_model_name_the_one_to_take(folder, tmp_path):
    newest = tmp_path / "run" / "checkpoints" / "latest" / "model"
    newest.mkdir(parents=True)
    refused(rf"a run folder; its newest model is {newest}", tmp_path / "run")
    adapter = tmp_path / "step" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    refused(rf"LoRA adapters alone; {tmp_path}/step/model has them merged", adapter)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"without its tokenizer; say where that is \(model\.tokenizer=FOLDER\)"):
        load_tokenizer(tmp_path / "bare")


def test_an_unknown_hub_id_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("cannot load nobody/no-such-model", "nobody/no-such-model")


def test_an_unknown_dtype(folder):
    refused("dtype 'int4' is unknown: use float32 or bfloat16", folder, dtype="int4")


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    refused(r"no \*\.safetensors weights", folder)
    torch.save({"weight": torch.zeros(1)}, folder / "pytorch_model.bin")
    refused(r"only pickled weights \(pytorch_model\.bin\)", folder)


def test_missing_weights_are_not_filled_with_random_numbers(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(r"1 weights are missing .* model\.layers\.1\.mlp\.up_proj\.weight", folder)


def test_damaged_weights_and_configs_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"not a tensor")
    refused("cannot load", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": "many"}))
    refused("cannot load .*: .*'vocab_size'", folder)
    (folder / "config.json").write_text("{ not json")
    refused("config.json: not JSON .* get the model again", folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("[]")
    refused("generation_config.json: not a JSON object; get the model again", folder)


def test_remote_code_is_not_trusted_by_default(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('remote code ran')")
    refused("cannot load", folder)


def test_two_ggufs_in_a_folder_are_ambiguous(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    refused("holds 2 GGUF files: name the one", tmp_path)


def test_a_broken_gguf_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("LUFFY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF but not really")
    refused("cannot load", tmp_path / "a.gguf")


def write_gguf(path, seed=0):
    """A Llama of one layer with a tokenizer of single letters, as llama.cpp writes it."""
    gguf = pytest.importorskip("gguf")
    numbers = np.random.default_rng(seed)
    letters = ["<unk>", "<s>", "</s>", *"abcdefghijkl", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(letters))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd": (16, 32), "output": (16, 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", numbers.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setenv("LUFFY_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    tokenizer, model = load_tokenizer(file), load_model(file)
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] and capsys.readouterr().err == ""
    assert [r.message for r in caplog.records if "converted once" in r.message] == [
        f"{file} is converted once; later starts read {next((tmp_path / 'cache' / 'gguf').glob('tiny-*'))}"
    ]
    half = load_model(file, dtype="bfloat16")
    assert all(torch.equal(p.bfloat16(), q) for p, q in zip(model.parameters(), half.parameters(), strict=True))
    model.save_pretrained(tmp_path / "saved")
    before = file.stat()
    file.write_bytes(bytes(before.st_size))  # nothing reads it again as long as it looks the same
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = load_model(file)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    write_gguf(file, seed=1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert not torch.equal(next(load_model(file).parameters()), next(model.parameters()))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LUFFY_CACHE", str(tmp_path / "file"))
    write_gguf(tmp_path / "tiny.gguf")
    refused("set LUFFY_CACHE to a writable folder", tmp_path / "tiny.gguf")


def test_a_folder_without_tokenizer(folder):
    with pytest.raises(UserError, match=r"no tokenizer_config\.json"):
        load_tokenizer(folder)


def test_eos_ids_gathers_all_and_wants_at_least_one():
    model = make_model("llama")
    tokenizer = types.SimpleNamespace(eos_token_id=7)
    assert eos_ids(model, tokenizer) == (2, 7)
    model.generation_config.eos_token_id = [9, 7]
    assert eos_ids(model, tokenizer) == (9, 7)
    model.generation_config.eos_token_id = None
    assert eos_ids(model, tokenizer) == (7,)
    with pytest.raises(UserError, match="no end-of-sequence token"):
        eos_ids(model, types.SimpleNamespace(eos_token_id=None))


def test_eos_ids_before_the_weights_are_read(folder, tmp_path, monkeypatch):
    """From the generation config, else from the config, whichever part of it names them."""
    tokenizer = types.SimpleNamespace(eos_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert load.eos_ids_in(folder, tokenizer) == (7, 9)
    (folder / "generation_config.json").unlink()
    assert load.eos_ids_in(folder, tokenizer) == (7, 2)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"eos_token_id": [5, 6]}}))
    assert load.eos_ids_in(folder, tokenizer) == (7, 5, 6)
    (folder / "config.json").write_text("{}")
    assert load.eos_ids_in(folder, tokenizer) == load.eos_ids_in(tmp_path / "nowhere", tokenizer) == (7,)
    monkeypatch.setenv("LUFFY_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    assert load.eos_ids_in(tmp_path / "tiny.gguf", tokenizer) == (7, 2)


@pytest.mark.slow
@pytest.mark.skipif("LUFFY_SMOLLM2" not in os.environ, reason="LUFFY_SMOLLM2 names no folder or .gguf of SmolLM2-135M")
def test_smollm2_loads_saves_and_loads_again(tmp_path):
    path = os.environ["LUFFY_SMOLLM2"]
    model, tokenizer = load_model(path), load_tokenizer(path)
    assert eos_ids(model, tokenizer) == (2,)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    again = load_model(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    text = "The answer is \\boxed{42}."
    assert load_tokenizer(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_rotary_frequencies_stay_float32_and_far_positions_stay_right(tmp_path):
    """A bfloat16 model as transformers itself loads it, at positions where rounded frequencies are off by radians."""
    from transformers import AutoModelForCausalLM

    from luffy.models.attention import PackedLayout
    from luffy.models.forward import forward_hidden

    make_model("qwen2", max_position_embeddings=4096, num_hidden_layers=1).save_pretrained(tmp_path)
    ours = load_model(tmp_path, "bfloat16")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert {b.dtype for n, b in ours.named_buffers() if "inv_freq" in n} == {torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="sdpa")
    ids = torch.randint(3, 100, (1000,), generator=torch.Generator().manual_seed(0))
    layout = PackedLayout([1000])
    with torch.no_grad():
        hidden = forward_hidden(ours, ids, layout.position_ids, layout)
        expected = theirs.model(ids[None]).last_hidden_state[0]
    error = (hidden - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert error[-250:].mean() < 0.02
    for name, buffer in ours.named_buffers():
        if "inv_freq" in name:
            buffer.copy_(buffer.bfloat16())
    with torch.no_grad():
        rounded = forward_hidden(ours, ids, layout.position_ids, layout)
    error = (rounded - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert error[-250:].mean() > 0.04  # this would have shown


@pytest.mark.parametrize("tied", [True, False])
def test_without_padding_a_model_is_itself_renormalised(tied):
    model = make_model("qwen2", vocab_size=50, tie_word_embeddings=tied)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(ids).logits[0]
        drop_padding_tokens(model, 50)
        assert torch.equal(model(ids).logits[0], before)
        drop_padding_tokens(model, 41)
        after = model(ids).logits[0]
    assert model.config.vocab_size == after.shape[-1] == 41
    torch.testing.assert_close(after.log_softmax(-1), before[:, :41].log_softmax(-1))


@pytest.mark.parametrize("kind", ["plain", "cleans up", "of its own"])
def test_many_responses_have_the_texts_that_transformers_gives_them(kind):
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args, **named):
            return super()._decode(*args, **named).upper()

    words = ["<end>", "well", ",", "no", "!"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    tokenizer = (Shouting if kind == "of its own" else PreTrainedTokenizerFast)(
        tokenizer_object=core, eos_token="<end>", clean_up_tokenization_spaces=kind == "cleans up"
    )
    texts = load.decode(tokenizer, [torch.tensor([1, 2, 3, 4, 0]), (3, 4), [], [0]])
    first = {"plain": "well , no !", "cleans up": "well, no!", "of its own": "WELL , NO !"}[kind]
    assert texts[0] == first and texts[2:] == ["", ""]
    assert texts == [tokenizer.decode(ids, skip_special_tokens=True) for ids in ([1, 2, 3, 4, 0], [3, 4], [], [0])]
    assert load.decode(tokenizer, []) == []
