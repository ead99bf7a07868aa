"""What the native engine promises beyond the conformance suite."""

import os

import pytest
import torch
from builders import make_model, make_request
from torch.utils._python_dispatch import TorchDispatchMode

from luffy.errors import UserError
from luffy.models.load import eos_ids, load_model, load_tokenizer
from luffy.rollout import NativeEngine
from luffy.rollout.engine import Engine
from luffy.rollout.native import native_engine
from luffy.types import Request, Sampling


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_a_prompt_is_prefilled_once_for_all_its_samples_however_few_the_slots(slots):
    engine = NativeEngine(make_model("llama"), max_slots=slots)
    requests = [make_request(range(10 + p, 20 + p), 2 + s, seed=s) for p in range(3) for s in range(8)]
    requests += [make_request(range(10, 20), 4, seed=s, prefix=(7, 8)) for s in range(2)]
    engine.generate(requests)
    assert engine.stats.prefilled_prompts == 4
    assert engine.stats.prefill_tokens == 3 * 10 + 12
    assert engine.stats.generated_tokens == 3 * sum(range(2, 10)) + 8


def test_a_finished_sequence_frees_its_slot_at_once():
    engine = NativeEngine(make_model("llama"), max_slots=2)
    # 8 steps in one slot; 2 steps each, four times over, in the other.
    engine.generate([make_request((5, 6), 9), *(make_request((5, 6 + i), 3, seed=i) for i in range(4))])
    assert engine.stats.decode_steps == 8
    # One-token responses come from the prefill and never take a step.
    engine.generate([make_request((5, 6), 9), *(make_request((5, 6 + i), 1, seed=i) for i in range(10))])
    assert engine.stats.decode_steps == 8


def test_a_stream_gives_what_generate_gives_as_it_finishes(monkeypatch):
    engine = NativeEngine(make_model("llama"), max_slots=4)
    requests = [make_request((5, 6 + i % 3), 2 + (5 * i) % 7, seed=i) for i in range(11)]
    expected, steps = engine.generate(requests), engine.stats.decode_steps

    def streamed():
        found = {}
        for number, completion in engine.stream(iter(requests)):
            assert torch.is_grad_enabled()  # the caller's own state
            found[number] = completion.token_ids.tolist()
        return found

    found = streamed()
    assert found == {i: c.token_ids.tolist() for i, c in enumerate(expected)} and list(found) != sorted(found)
    assert engine.stats.decode_steps == steps
    monkeypatch.setattr(native_engine, "STREAMED_AT_ONCE", 5)
    assert streamed() == found
    assert streamed_in_parts(engine, requests, monkeypatch) == found


def streamed_in_parts(engine, requests, monkeypatch):
    """By an engine that cannot do better."""
    monkeypatch.setattr("luffy.rollout.engine.STREAM_PART", 4)
    return {number: completion.token_ids.tolist() for number, completion in Engine.stream(engine, requests)}


def test_steps_are_the_best_possible_when_all_fit():
    engine = NativeEngine(make_model("llama"), max_slots=64)
    engine.generate([make_request((5, 6), 2 + i, seed=i) for i in range(20)])
    assert engine.stats.decode_steps == 20
    assert engine.stats.seconds > 0 and engine.stats.tokens_per_second > 0


def test_one_transfer_to_the_host_per_step(monkeypatch):
    counted = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: counted.append(1) or plain(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a scalar was read back"))
    engine = NativeEngine(make_model("llama"), max_slots=4)
    engine.generate([make_request((5, 6), 10, seed=i) for i in range(4)])
    assert len(counted) == 1 + engine.stats.decode_steps


def test_training_state_comes_back_and_checkpointing_does_not_disturb():
    model = make_model("llama")
    expected = NativeEngine(model).generate([make_request((5, 6, 7), 12, seed=1)])[0].token_ids.tolist()
    model.train()
    model.model.layers[1].eval()
    model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    got = NativeEngine(model).generate([make_request((5, 6, 7), 12, seed=1)])[0]
    assert got.token_ids.tolist() == expected
    assert [module.training for module in model.modules()] == modes
    assert model.is_gradient_checkpointing and not got.log_probs.requires_grad


def test_the_model_still_trains_after_generating():
    model = make_model("qwen3").train()
    NativeEngine(model).generate([make_request((5, 6, 7), 5)])
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([[5, 6, 7, 8]])
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_bfloat16_log_probs_stay_with_a_plain_forward_pass(architecture):
    model = make_model(architecture, initializer_range=0.05).to(torch.bfloat16)
    requests = [make_request(range(10, 20 + s), 20, seed=s, temperature=0.8) for s in range(6)]
    got = NativeEngine(model, max_slots=4).generate(requests)
    model.set_attn_implementation("eager")
    for request, completion in zip(requests, got, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float() / 0.8
        expected = torch.log_softmax(logits, -1).gather(-1, completion.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(completion.log_probs, expected, atol=0.05, rtol=0)
        assert (completion.log_probs - expected).abs().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_batch_invariance_is_to_the_bit(dtype):
    model = make_model("mistral", sliding_window=24, hidden_size=256, num_hidden_layers=2).to(dtype)
    mine = [make_request(range(10, 30 + s), 20, seed=s, temperature=1.3) for s in range(3)]
    others = [make_request(range(40, 60 + 20 * s), 30, seed=s) for s in range(5)]
    engine = NativeEngine(model, max_slots=6, batch_invariant=True)
    alone = [engine.generate([request])[0] for request in mine]
    crowd = engine.generate([*others[:3], *mine, *others[3:]])[3:6]
    for a, b in zip(alone, crowd, strict=True):
        assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.log_probs, b.log_probs)


def test_a_lora_wrapped_policy_generates_with_its_adapters():
    peft = pytest.importorskip("peft")
    base = make_model("llama")
    plain = NativeEngine(base).generate([make_request((5, 6, 7), 12, temperature=0.0)])[0].token_ids.tolist()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    got = NativeEngine(model).generate([make_request((5, 6, 7), 12, temperature=0.0)])[0].token_ids.tolist()
    base.set_attn_implementation("eager")
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert got[: expected.shape[1] - 3] == expected[0, 3:].tolist()
    assert got != plain


def test_a_lora_policy_is_never_merged_and_a_sync_computes_nothing(monkeypatch):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(target_modules="all-linear"))

    def refuse(*_, **__):
        raise AssertionError("merged")

    for name in ("merge", "get_delta_weight"):
        monkeypatch.setattr(peft.tuners.lora.layer.Linear, name, refuse)

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"a sync computes {func}")

    engine = NativeEngine(model)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    for version in range(2):
        with Noting():
            engine.sync(version)
        engine.generate([make_request((5, 6, 7), 12)])
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_bad_settings_are_refused():
    model = make_model("llama")
    with pytest.raises(UserError, match="max_slots is 0"):
        NativeEngine(model, max_slots=0)
    with pytest.raises(UserError, match="max_context is 1000: the model takes 1 to 512"):
        NativeEngine(model, max_context=1000)
    with pytest.raises(UserError, match="exceed the context of 10"):
        NativeEngine(model, max_context=10).generate([make_request((1, 2, 3), 8)])


def test_broken_weights_stop_the_rollout_and_leave_the_model_as_it_was():
    model = make_model("llama").train()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    for knobs in ({}, {"temperature": 0.0}, {"top_p": 0.5}):
        with pytest.raises(FloatingPointError, match="NaN logits for request 0 after 3 tokens"):
            NativeEngine(model).generate([make_request((5, 6, 7), 4, **knobs)])
    assert model.training


def test_sync_copies_nothing_and_remembers_the_version():
    engine = NativeEngine(make_model("llama"))
    pointers = [p.data_ptr() for p in engine.model.parameters()]
    engine.sync(7)
    assert engine.version == 7 and [p.data_ptr() for p in engine.model.parameters()] == pointers


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_gpu_draws_what_the_cpu_draws(architecture):
    model = make_model(architecture)
    requests = [make_request(range(10, 20 + s), 30, seed=s, temperature=0.9, top_p=0.9) for s in range(8)]
    requests += [make_request(range(10, 20), 30, temperature=0.0)]
    on_cpu = NativeEngine(model, max_slots=5).generate(requests)
    on_gpu = NativeEngine(model.cuda(), max_slots=5).generate(requests)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_bfloat16_on_the_gpu_stays_with_float32(architecture):
    model = make_model(architecture, initializer_range=0.05).cuda()
    requests = [make_request(range(10, 20 + s), 30, seed=s) for s in range(8)]
    half = NativeEngine(model.to(torch.bfloat16), max_slots=5).generate(requests)
    model.float().set_attn_implementation("eager")
    for request, completion in zip(requests, half, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids.tolist()]]).cuda()
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].cpu()
        expected = torch.log_softmax(logits, -1).gather(-1, completion.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(completion.log_probs, expected, atol=0.08, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif("LUFFY_SMOLLM2" not in os.environ, reason="LUFFY_SMOLLM2 names no folder or .gguf of SmolLM2-135M")
def test_smollm2_greedy_and_log_probs_equal_transformers():
    path = os.environ["LUFFY_SMOLLM2"]
    model, tokenizer = load_model(path), load_tokenizer(path)
    eos = eos_ids(model, tokenizer)
    texts = ["What is 17 + 25?", "Name three colours.", "Write a haiku about rain.", "Say hi."]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [
        tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for chat in chats
    ]
    greedy = [make_request(ids, 40, temperature=0.0, eos_ids=eos) for ids in prompts]
    sampled = [make_request(ids, 24, seed=s, temperature=0.9, eos_ids=eos) for ids in prompts[:2] for s in range(2)]
    got = NativeEngine(model, max_slots=3).generate(greedy + sampled)
    model.set_attn_implementation("sdpa")
    for request, completion in zip(greedy, got, strict=False):
        ids = torch.tensor([request.prompt_ids])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=list(eos))
        assert completion.token_ids.tolist() == out[0, ids.shape[1] :].tolist()
    for request, completion in zip(greedy + sampled, got, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        scaled = logits / (request.sampling.temperature or 1.0)
        expected = torch.log_softmax(scaled, -1).gather(-1, completion.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(completion.log_probs, expected, atol=1e-3, rtol=1e-3)


def test_every_completion_is_told_as_it_finishes():
    model = make_model("llama")
    requests = [Request((5, 6, 7), seed, Sampling(max_tokens=n)) for seed, n in enumerate((9, 2, 5))]
    told = []
    made = NativeEngine(model).generate(requests, lambda done, count: told.append(done), told.extend)
    assert [t if isinstance(t, int) else t[0] for t in told] == [1, 1, 2, 2, 0, 3]
    assert all(made[i] is completion for i, completion in told[::2])
