"""Drafts on a GPU: passes over drafts, from CUDA graphs, draw what bursts draw."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from builders import make_model, make_request

pytest.importorskip("triton")

from bench.models import random_model

from luffy.models.attention import PackedLayout
from luffy.models.forward import forward_hidden
from luffy.rollout import NativeEngine
from luffy.rollout.native import Drafts

pytestmark = pytest.mark.gpu


def with_texts(requests, completions):
    """Requests with the very responses as drafts, tokens behind their ends, and half of them with an error."""
    texts = [[*c.token_ids.tolist(), 5, 6] for c in completions]
    for text in texts[::2]:
        text[len(text) // 2] = 9
    return [replace(request, drafts=tuple(map(tuple, texts))) for request in requests]


def different(ours, theirs):
    return sum(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(ours, theirs, strict=True))


def all_log_probs(model, given, ids):
    layout = PackedLayout([len(given) + len(ids)], "cuda")
    with torch.no_grad():
        hidden = forward_hidden(model, torch.tensor([*given, *ids], device="cuda"), layout.position_ids, layout)
        logits = torch.nn.functional.linear(hidden, model.get_output_embeddings().weight).float()
    return logits[len(given) - 1 : -1].log_softmax(-1).cpu()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_drafts_change_no_token(architecture):
    """From 60 rows to one: passes of 4 tokens, then of 8, in graphs of every size."""
    model = make_model(architecture).cuda()
    requests = [
        make_request((5, 6, 7 + i % 3), 8 + 3 * i, seed=i, temperature=(1.0, 0.7, 0.0)[i % 3], eos_ids=(11,))
        for i in range(60)
    ]
    plain = NativeEngine(model).generate(requests)
    engine = NativeEngine(model, drafts=Drafts(always=True))
    drafted = engine.generate(with_texts(requests, plain))
    assert different(drafted, plain) <= 2  # float32 sums in another order may turn one draw in thousands
    assert engine.metrics()["rollout/accepted_per_pass"].value > 3
    assert len(engine._paged._verifier._graphs) >= 3
    assert different(engine.generate(with_texts(requests, plain)), drafted) <= 2


def test_rows_with_top_p_and_long_contexts():
    model = make_model("llama", max_position_embeddings=2048).cuda()
    requests = [
        make_request([3 + (7 * i * i) % 90 for i in range(900 + 30 * n)], 300, seed=n, top_p=0.9 if n % 2 else 1.0)
        for n in range(6)
    ]
    plain = NativeEngine(model).generate(requests)
    engine = NativeEngine(model, drafts=Drafts(always=True))
    assert different(engine.generate(with_texts(requests, plain)), plain) <= 1
    assert engine.stats.decode_steps < 200


def test_a_cache_taken_elsewhere_and_weights_moved():
    model = make_model("llama").cuda()
    engine = NativeEngine(model, drafts=Drafts(always=True))
    requests = [make_request((5, 6, 7), 40, seed=i) for i in range(4)]
    first = engine.generate(requests)
    verifier = engine._paged._verifier
    hole = torch.empty(64 << 20, device="cuda")  # the next block will lie elsewhere
    assert different(engine.generate(requests), first) == 0
    assert engine._paged._verifier is verifier
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert different(engine.generate(requests), first) == 0
    assert engine._paged._verifier is not verifier
    del hole


def test_log_probs_stay_with_the_trainers_in_bfloat16():
    model = random_model("qwen2-0.5b", "bfloat16", "cuda")
    prompt = tuple(range(100, 180))
    requests = [make_request(prompt, 120, seed=i) for i in range(12)]
    plain = NativeEngine(model).generate(requests)
    completions = NativeEngine(model, drafts=Drafts(always=True)).generate(with_texts(requests, plain))
    parts = []
    for completion in completions:
        there = all_log_probs(model, prompt, completion.token_ids.tolist())
        parts.append((there.gather(1, completion.token_ids[:, None])[:, 0] - completion.log_probs).abs())
    difference = torch.cat(parts)
    assert difference.mean() < 0.05 and difference.max() < 0.5


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_what_follows_a_draft_that_stands_passes_a_chi_square_test(temperature):
    """Every draft says the same second token, a likely one: the third ones behind it."""
    model, draws, prompt = make_model("llama", vocab_size=30).cuda(), 12_000, (5, 6, 7)
    plain = NativeEngine(model).generate([make_request(prompt, 3, seed=i, temperature=temperature) for i in range(200)])
    common = int(torch.stack([completion.token_ids for completion in plain])[:, 1].mode().values)
    texts = tuple((first, common, (first + 3) % 30) for first in range(30))
    requests = [replace(make_request(prompt, 3, seed=i, temperature=temperature), drafts=texts) for i in range(draws)]
    engine = NativeEngine(model, max_slots=32, drafts=Drafts(always=True))
    ids = [c.token_ids.tolist() for c in engine.generate(requests)]
    assert engine.metrics()["rollout/accepted_per_pass"].value > 1.005
    behind = Counter((first, third) for first, second, third in ids if second == common)
    firsts = Counter(first for first, second, _ in ids if second == common)
    expected = torch.zeros(30, dtype=torch.double)
    for first, count in firsts.items():
        expected += count * (all_log_probs(model, (*prompt, first, common), [0])[0].double() / temperature).softmax(-1)
    seen = Counter({token: sum(n for (_, third), n in behind.items() if third == token) for token in range(30)})
    likely = [token for token in range(30) if expected[token] >= 5]
    chi = sum((seen[token] - expected[token].item()) ** 2 / expected[token].item() for token in likely)
    freedom = len(likely) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom), (chi, freedom)
