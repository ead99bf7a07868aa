"""The fast engine and the fast update on a GPU: speed must not have changed a number."""

import math
import os
from collections import Counter

import pytest
import torch
from builders import make_model, make_request, make_sample, make_samples

pytest.importorskip("triton")

from bench.models import random_model

from luffy.errors import UserError
from luffy.kernels.quantize import quantize_rows
from luffy.learn.packing import pack
from luffy.learn.policy import Policy
from luffy.learn.scorer import TokenScorer
from luffy.models.attention import PackedLayout
from luffy.models.forward import forward_hidden
from luffy.models.load import load_model, load_tokenizer
from luffy.models.products import Quantized
from luffy.rollout import NativeEngine
from luffy.rollout.native import paged_cache

pytestmark = pytest.mark.gpu


def trainer_log_probs(model, completion, prompt):
    """The trainer's own log-probs of a completion."""
    ids = torch.tensor([*prompt, *completion.token_ids.tolist()], device="cuda")
    layout = PackedLayout([len(ids)], "cuda")
    hidden = forward_hidden(model, ids, layout.position_ids, layout)
    logits = torch.nn.functional.linear(hidden, model.get_output_embeddings().weight).float()
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, ids[len(prompt) :, None])[:, 0].cpu()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_graphs_draw_what_slots_draw(architecture):
    model = make_model(architecture).cuda()
    requests = [
        make_request(range(3, 4 + i % 50), 5 + i % 90, seed=i, temperature=0.0 if i % 4 == 0 else 1.0)
        for i in range(150)
    ]
    slots = NativeEngine(model, decoding="slots").generate(requests)
    engine = NativeEngine(model)
    pages = engine.generate(requests)
    assert engine._paged is not None, "the fast path did not run"
    different = sum(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(slots, pages, strict=True))
    assert different <= 1  # float32 sums in another order may turn one draw in thousands
    again = engine.generate(requests)
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in pages]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_merged_products_draw_what_separate_ones_draw(architecture):
    model = make_model(architecture).cuda()
    requests = [
        make_request(range(3, 4 + i % 50), 5 + i % 90, seed=i, temperature=float(i % 4 > 0)) for i in range(150)
    ]
    separate = NativeEngine(model).generate(requests)
    merged = NativeEngine(model, merged=True).generate(requests)
    assert len({p.weight.untyped_storage().data_ptr() for p in projections(model)}) == 1
    different = sum(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(separate, merged, strict=True))
    assert different <= 1  # float32 sums in another order may turn one draw in thousands


def projections(model):
    attention = model.model.layers[0].self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


def test_merged_products_are_as_near_to_the_trainer_as_separate_ones_in_bfloat16():
    model = random_model("qwen2-0.5b", "bfloat16", "cuda")
    held = bytes_of_weights(model)
    requests = [make_request(range(100 + i, 180), 200, seed=i) for i in range(24)]
    separate = distance_to_the_trainer(model, requests)
    merged = distance_to_the_trainer(model, requests, merged=True)
    assert bytes_of_weights(model) == held  # nothing exists twice
    assert merged.mean() < 1.2 * separate.mean() + 1e-3 and merged.max() < 0.5


def bytes_of_weights(model):
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_of_merged_products_see_an_update(dtype):
    model = make_model("qwen2").cuda().to(dtype)
    engine = NativeEngine(model, merged=True)
    requests = [make_request((5, 6, 7), 40, seed=i, temperature=float(i % 2)) for i in range(20)]
    before = [c.token_ids.tolist() for c in engine.generate(requests)]
    decoder = engine._paged._decoder
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, device="cuda", generator=generator).to(dtype), alpha=0.05)
    after = [c.token_ids.tolist() for c in engine.generate(requests)]
    assert engine._paged._decoder is decoder and after != before
    assert after == [c.token_ids.tolist() for c in NativeEngine(model, merged=True).generate(requests)]


@pytest.fixture
def has_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8 products")


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_float8_products_are_those_of_the_quantized_numbers(has_fp8, rows):
    torch.manual_seed(0)
    linear = torch.nn.Linear(896, 1152).cuda().bfloat16()
    weight, scales = quantize_rows(linear.weight.detach())
    x = torch.randn(rows, 896, device="cuda", dtype=torch.bfloat16)
    ours = Quantized(weight, scales, linear.bias.detach()).product(x).double()
    own, own_scales = quantize_rows(x)
    exact = (own.double() * own_scales[:, None]) @ (weight.double() * scales[:, None]).T + linear.bias.double()
    assert (ours - exact).norm() < 0.005 * exact.norm()  # bfloat16, and sums that the hardware keeps short
    assert (ours - linear(x).double()).norm() < 0.06 * exact.norm()


def test_float8_rollouts_stay_near_the_trainer_and_see_an_update(has_fp8):
    model = random_model("qwen2-0.5b", "bfloat16", "cuda")
    requests = [make_request(range(100 + i, 180), 100, seed=i) for i in range(24)]
    difference = distance_to_the_trainer(model, requests, precision="fp8")
    assert difference.mean() < 0.2 and difference.max() < 2
    engine = NativeEngine(model, precision="fp8")
    before = [c.token_ids.tolist() for c in engine.generate(requests)]
    decoder = engine._paged._decoder
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    after = [c.token_ids.tolist() for c in engine.generate(requests)]
    assert engine._paged._decoder is decoder and after != before
    assert after == [c.token_ids.tolist() for c in NativeEngine(model, precision="fp8").generate(requests)]
    assert 0 < engine.metrics()["rollout/quantize_s"].value < 5
    with pytest.raises(UserError, match=r"no rollouts in fp8 .* set model.dtype=bfloat16"):
        NativeEngine(make_model("llama").cuda(), precision="fp8")


def test_float8_sampling_passes_a_chi_square_test(has_fp8):
    """Against the logits of the quantized model itself."""
    model = make_model("llama", vocab_size=30, hidden_size=128, intermediate_size=256).cuda().bfloat16()
    engine = NativeEngine(model, precision="fp8")
    completions = engine.generate([make_request((5, 6, 7), 2, seed=i) for i in range(40_000)])
    first = modal(completions)
    counts = Counter(int(c.token_ids[1]) for c in completions if int(c.token_ids[0]) == first)
    log_p = {int(c.token_ids[1]): float(c.log_probs[1]) for c in completions if int(c.token_ids[0]) == first}
    total = sum(counts.values())
    expected = {token: total * math.exp(value) for token, value in log_p.items() if total * math.exp(value) >= 5}
    assert sum(map(math.exp, log_p.values())) == pytest.approx(1, abs=0.02)
    chi = sum((counts[token] - value) ** 2 / value for token, value in expected.items())
    freedom = len(expected) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom), (chi, freedom)


@pytest.fixture
def pieces(monkeypatch):
    """The variable-length kernel's calls for prompts that are prefilled in pieces: the window of each."""
    kept, kernel = [], paged_cache.causal_varlen

    def counted(*args):
        kept.append(args[-1])
        return kernel(*args)

    monkeypatch.setattr(paged_cache, "causal_varlen", counted)
    return kept


def distance_to_the_trainer(model, requests, **knobs):
    """Of all log-probs of the engine's own tokens, from the trainer's."""
    completions = NativeEngine(model, **knobs).generate(requests)
    with torch.no_grad():
        return torch.cat([
            (trainer_log_probs(model, completion, request.prompt_ids) - completion.log_probs).abs()
            for request, completion in zip(requests, completions, strict=True)
        ])  # fmt: skip


@pytest.mark.parametrize("prefill_tokens", [None, 64], ids=["whole prompts", "prompts in pieces"])
def test_log_probs_stay_with_the_trainers_in_bfloat16(prefill_tokens, pieces):
    model = random_model("qwen2-0.5b", "bfloat16", "cuda")
    prompt = tuple(range(100, 180))
    requests = [make_request(prompt, 200, seed=i) for i in range(24)] + [make_request(range(500, 2000), 60, seed=7)]
    difference = distance_to_the_trainer(model, requests, prefill_tokens=prefill_tokens)
    assert bool(pieces) == (prefill_tokens is not None)
    # Two ways of adding in bfloat16; vLLM's log-probs of a 1.5B model are as far away (docs/engines.md).
    assert difference.mean() < 0.05 and difference.max() < 0.5


def test_prompts_in_pieces_see_the_models_window_in_bfloat16(pieces):
    model = make_model("mistral", initializer_range=0.05, sliding_window=40).cuda().to(torch.bfloat16)
    prompts = [[3 + (7 * i * i) % 190 for i in range(n)] for n in (150, 90, 30)]
    requests = [make_request(prompt, 30, seed=i) for prompt in prompts for i in range(4)]
    difference = distance_to_the_trainer(model, requests, prefill_tokens=32)
    assert set(pieces) == {40}
    assert difference.mean() < 0.01 and difference.max() < 0.06


def test_sampling_passes_a_chi_square_test():
    model = make_model("llama", vocab_size=30).cuda()
    draws = 40_000
    completions = NativeEngine(model).generate([make_request((5, 6, 7), 2, seed=i) for i in range(draws)])
    first = modal(completions)
    counts = Counter(int(c.token_ids[1]) for c in completions if int(c.token_ids[0]) == first)
    ids = torch.tensor([5, 6, 7, first], device="cuda")
    layout = PackedLayout([4], "cuda")
    with torch.no_grad():
        hidden = forward_hidden(model, ids, layout.position_ids, layout)[-1]
        p = torch.softmax((model.get_output_embeddings().weight @ hidden).double(), dim=-1).cpu()
    total = sum(counts.values())
    chi = sum((counts[t] - total * p[t].item()) ** 2 / (total * p[t].item()) for t in range(30) if total * p[t] >= 5)
    freedom = sum(total * p[t] >= 5 for t in range(30)) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom), (chi, freedom)


def modal(completions):
    return Counter(int(c.token_ids[0]) for c in completions).most_common(1)[0][0]


def test_a_cache_given_back_and_taken_elsewhere_leaves_graphs_right():
    model = make_model("llama").cuda()
    engine = NativeEngine(model)
    requests = [make_request((5, 6, 7), 40, seed=i) for i in range(20)]
    first = [c.token_ids.tolist() for c in engine.generate(requests)]
    decoder, address = engine._paged._decoder, int(engine._paged.cache.address)
    assert address == 0  # given back
    hole = torch.empty(64 << 20, device="cuda")  # the next block will lie elsewhere
    assert [c.token_ids.tolist() for c in engine.generate(requests)] == first
    assert engine._paged._decoder is decoder
    del hole


def test_memory_does_not_grow_with_the_number_of_problems():
    model = make_model("llama").cuda()
    engine = NativeEngine(model, max_slots=64)
    peaks = []
    for count in (64, 64, 1024):
        torch.cuda.reset_peak_memory_stats()
        engine.generate([make_request((5 + i % 90, 6, 7 + i % 60), 40, seed=i) for i in range(count)])
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[2] < 1.3 * peaks[1]


def real_prompts(path):
    tokenizer = load_tokenizer(path)
    questions = ["What is the capital of France?", "Add 17 and 25.", "Write a sentence about the sea."]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True) for q in questions
    ]
    return [tuple(p["input_ids"] if not isinstance(p, list) else p) for p in prompts]


needs_real_weights = pytest.mark.skipif(
    "LUFFY_SMOLLM2" not in os.environ, reason="LUFFY_SMOLLM2 names SmolLM2-135M-Instruct"
)


@needs_real_weights
def test_greedy_tokens_of_real_weights_are_those_of_transformers():
    path = os.environ["LUFFY_SMOLLM2"]
    model = load_model(path, "float32", "cuda")
    prompts = real_prompts(path)
    ours = NativeEngine(model).generate([make_request(p, 60, temperature=0.0) for p in prompts])
    model.set_attn_implementation("sdpa")
    for prompt, completion in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        theirs = model.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert completion.token_ids.tolist() == theirs[0, len(prompt) :].tolist()


def scored_by_the_trainer(model, requests, completions):
    """(trainer's, engine's) log-probs of all tokens, prompts shared as in an update."""
    pairs = zip(requests, completions, strict=True)
    samples = [make_sample(r.prompt_ids, c.token_ids, log_probs=c.log_probs) for r, c in pairs]
    (batch,) = pack(samples, 100_000, "token-mean", 200)
    with torch.no_grad():
        ours = TokenScorer(model)(batch.to("cuda"), 1.0).log_prob
    return ours.float().cpu(), torch.cat([samples[i].engine_log_probs for i in batch.order])


@needs_real_weights
@pytest.mark.parametrize(
    ("dtype", "mean", "largest", "bias"), [("float32", 1e-4, 5e-3, 1e-4), ("bfloat16", 0.06, 0.8, 0.02)]
)
def test_log_probs_of_real_weights_are_the_trainers(dtype, mean, largest, bias):
    """bfloat16 on a CPU: 0.041 in the mean, 0.34 at most; the engine from the same weights in float32: 0.033."""
    path = os.environ["LUFFY_SMOLLM2"]
    model = load_model(path, dtype, "cuda")
    requests = [make_request(prompt, 100, seed=i) for prompt in real_prompts(path) for i in range(8)]
    completions = NativeEngine(model).generate(requests)
    trainers, engines = scored_by_the_trainer(model, requests, completions)
    difference = trainers - engines
    assert difference.abs().mean() < mean and difference.abs().max() < largest and difference.mean().abs() < bias
    if dtype == "bfloat16":  # two errors of one size, where a wrong engine would have one of its own
        exact, _ = scored_by_the_trainer(model.float(), requests, completions)
        assert difference.abs().mean() < 2 * (trainers - exact).abs().mean()


def update_gradients(cfg, model):
    policy = Policy(model, cfg)
    policy.optimizer.step = lambda lr, norm: None
    policy.optimizer.zero_grad = lambda: None
    policy.update(make_samples(), 0.01)
    return {n: m.grad.detach().float().cpu().clone() for n, m in policy.optimizer.masters.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_update_has_the_gradients_of_the_plain_one(make_config, monkeypatch, dtype):
    cfg = make_config()
    fused = update_gradients(cfg, load_model(cfg.model.path, dtype, "cuda"))
    monkeypatch.setattr("luffy.models.forward.fused_decoder", lambda causal: None)
    monkeypatch.setattr("luffy.core.logprobs.kernels_serve", lambda device: False)
    plain = update_gradients(cfg, load_model(cfg.model.path, dtype, "cuda"))
    for name, value in plain.items():
        error = (fused[name] - value).norm() / value.norm().clamp(min=1e-8)
        assert error < (1e-4 if dtype == "float32" else 0.05), (name, error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_optimizer_takes_the_same_steps(make_config, dtype):
    weights = []
    for offload in (False, True):
        cfg = make_config(optim={"lr": 1e-3, "offload": offload, "weight_decay": 0.1})
        policy = Policy(load_model(cfg.model.path, dtype, "cuda"), cfg)
        start = flat_parameters(policy.model)
        for _ in range(4):
            policy.update(make_samples(), 1e-3)
        weights.append(flat_parameters(policy.model))
    # Adam turns the sign of a gradient near 0 into a whole step, so single weights may part; the whole does not.
    assert (weights[1] - weights[0]).norm() < 0.1 * (weights[0] - start).norm()


def flat_parameters(model):
    return torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()])
