"""What any engine must do. To add one: a builder in ENGINES that takes a model and a number of slots.

The engines of vLLM run the same tests under `make test-vllm`.
"""

import functools
from collections.abc import Callable

import pytest
import torch
import vllm_engines
from builders import ARCHITECTURES, make_model, make_request
from scipy.stats import chisquare
from talks import Talks, assert_drawn_alone

from luffy.errors import UserError
from luffy.rollout import Engine, NativeEngine
from luffy.rollout.sampling import keep_mask
from luffy.types import Completion, Request, Sampling

Build = Callable[..., Engine]

ENGINES: dict[str, Build] = {
    "native": lambda model, slots=16: NativeEngine(model, max_slots=slots),
    "native-invariant": lambda model, slots=16: NativeEngine(model, max_slots=slots, batch_invariant=True),
    "vllm": vllm_engines.colocated,
    "vllm-remote": vllm_engines.remote,
}


@pytest.fixture(params=[pytest.param(e, marks=[pytest.mark.vllm] if "vllm" in e else []) for e in ENGINES])
def build(request) -> Build:
    return ENGINES[request.param]


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return wide_model(request.param)


def wide_model(architecture: str, **changes):
    """Heads of 32: vLLM's attention on a CPU takes no smaller ones."""
    heads = {"head_dim": 32} if architecture == "qwen3" else {}
    return make_model(architecture, **{"hidden_size": 128, **heads, **changes})


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, 200, (length,), generator=generator).tolist())


def reference_greedy(model, request: Request) -> list[int]:
    """`transformers` itself, with its own attention."""
    model.set_attn_implementation("eager")
    given = torch.tensor([request.prompt_ids + request.prefix_ids])
    eos = list(request.sampling.eos_ids) or None
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=request.sampling.max_tokens,
        do_sample=False,
        eos_token_id=eos if eos else -1,
        pad_token_id=0,
    )
    return out[0, given.shape[1] :].tolist()


def reference_log_probs(model, request: Request, completion: Completion) -> torch.Tensor:
    """A plain forward pass over the finished sequence."""
    model.set_attn_implementation("eager")
    given = request.prompt_ids + request.prefix_ids
    ids = torch.tensor([[*given, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(given) - 1 : -1].float()
    log_probs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)
    if completion.behavior_log_probs is not None:
        log_probs = renormalised(log_probs, request.sampling)
    return log_probs.gather(-1, completion.token_ids[:, None]).squeeze(-1)


def renormalised(log_probs: torch.Tensor, s: Sampling) -> torch.Tensor:
    """What an engine draws with that says so: only the tokens that top-k and top-p leave."""
    count = log_probs.shape[0]
    top_k = torch.full((count, 1), s.top_k or log_probs.shape[1])
    kept = keep_mask(log_probs, top_k, torch.full((count, 1), s.top_p, dtype=torch.float64))
    return torch.log_softmax(log_probs.masked_fill(~kept, -torch.inf), -1)


GREEDY = [make_request(prompt(n), 16, temperature=0.0, eos_ids=(2, 3)) for n in (1, 5, 13, 30, 7)]


@functools.cache
def greedy_tokens(architecture: str) -> list[list[int]]:
    model = wide_model(architecture)
    return [reference_greedy(model, request) for request in GREEDY]


def test_greedy_equals_transformers_token_by_token(model, build):
    got = build(model, slots=3).generate(GREEDY)
    assert [c.token_ids.tolist() for c in got] == greedy_tokens(model.config.model_type)


def test_log_probs_equal_a_plain_forward_pass(model, build):
    knobs = [{}, {"temperature": 0.6}, {"temperature": 1.7, "top_p": 0.8}, {"top_k": 5}, {"temperature": 0.0}]
    requests = [make_request(prompt(4 + 5 * i), 25, seed=i, **k) for i, k in enumerate(knobs)]
    for request, completion in zip(requests, build(model).generate(requests), strict=True):
        expected = reference_log_probs(model, request, completion)
        given = completion.log_probs if completion.behavior_log_probs is None else completion.behavior_log_probs
        torch.testing.assert_close(given, expected, atol=2e-5, rtol=1e-4)
        assert completion.log_probs.dtype == torch.float32 and completion.token_ids.dtype == torch.long


def test_the_same_seed_gives_the_same_tokens_in_any_company(model, build):
    mine = [make_request(prompt(6), 6, seed=s, temperature=1.2, top_p=0.95) for s in range(4)]
    others = [make_request(prompt(3 + i, seed=1), 3 + i % 4, seed=i, top_k=i) for i in range(7)]
    alone = [build(model).generate([request])[0].token_ids.tolist() for request in mine]
    assert len({tuple(ids) for ids in alone}) == 4
    for slots in (1, 5, 32):
        crowd = build(model, slots=slots).generate([*others[:5], *mine[:3], *others[5:], *mine[3:]])
        assert [c.token_ids.tolist() for c in [*crowd[5:8], *crowd[10:]]] == alone


def test_a_prefix_continues_exactly_where_it_was_cut(model, build):
    engine = build(model)
    # An engine of vLLM draws a request's noise from its seed as it goes, so a sampled rest is another one.
    temperature = 1.1 if isinstance(engine, NativeEngine) else 0.0
    whole = make_request(prompt(9), 20, seed=3, temperature=temperature)
    full = engine.generate([whole])[0]
    ids = full.token_ids.tolist()
    cut = [
        make_request(whole.prompt_ids, 20 - k, seed=3, temperature=temperature, prefix=tuple(ids[:k]))
        for k in (1, 7, 19)
    ]
    for k, rest in zip((1, 7, 19), engine.generate(cut), strict=True):
        assert rest.token_ids.tolist() == ids[k:]
        torch.testing.assert_close(rest.log_probs, full.log_probs[k:], atol=2e-5, rtol=1e-4)


def test_a_foreign_prefix_equals_continuing_prompt_plus_prefix(model, build):
    given, prefix = prompt(8), prompt(11, seed=4)
    split = make_request(given, 15, temperature=0.0, prefix=prefix)
    joined = make_request(given + prefix, 15, temperature=0.0)
    a, b = build(model).generate([split, joined])
    assert a.token_ids.tolist() == b.token_ids.tolist() == reference_greedy(model, split)


def test_n_samples_of_one_prompt_prefill_it_once_and_differ(build):
    """80 tokens: several whole blocks of vLLM's cache, which shares nothing smaller."""
    engine, given = build(wide_model("llama")), prompt(80, seed=7)
    (alone,) = engine.generate([make_request(given, 8, seed=2)])
    engine.sync(engine.version + 1)  # nothing is cached any more
    samples = engine.generate([make_request(given, 8, seed=s) for s in range(6)])
    assert len({tuple(c.token_ids.tolist()) for c in samples}) == 6
    assert samples[2].token_ids.tolist() == alone.token_ids.tolist()
    if engine.stats.prefill_tokens:  # a server does not tell
        assert 80 <= engine.stats.prefill_tokens <= 80 + 5 * vllm_engines.BLOCK


def test_it_stops_at_any_eos_keeps_it_and_otherwise_says_length(build):
    model = wide_model("llama")
    free = build(model).generate([make_request(prompt(5), 30, seed=1)])[0]
    ids = free.token_ids.tolist()
    assert free.finish == "length" and len(ids) == 30
    first_seen = {token: ids.index(token) for token in ids}
    early, late = ids[4], ids[15]
    stopped = build(model).generate([make_request(prompt(5), 30, seed=1, eos_ids=(late, early, 199))])[0]
    end = min(first_seen[early], first_seen[late])
    assert stopped.finish == "stop" and stopped.token_ids.tolist() == ids[: end + 1]
    short = build(model).generate(
        [make_request(prompt(5), 1, seed=1), make_request(prompt(5), 1, seed=1, eos_ids=(ids[0],))]
    )
    assert [(c.token_ids.tolist(), c.finish) for c in short] == [(ids[:1], "length"), (ids[:1], "stop")]


def test_every_request_keeps_its_own_parameters_and_place(build):
    model = wide_model("qwen2")
    requests = [
        make_request(prompt(5), 3, seed=0, temperature=0.0),
        make_request(prompt(5), 12, seed=0, top_k=1),
        make_request(prompt(5), 7, seed=0, temperature=2.0),
        make_request(prompt(5), 7, seed=1, temperature=2.0),
        make_request(prompt(5), 7, seed=0, top_p=1e-6),
    ]
    got = [c.token_ids.tolist() for c in build(model, slots=2).generate(requests)]
    assert [len(ids) for ids in got] == [3, 12, 7, 7, 7]
    assert got[0] == got[1][:3] == got[4][:3] and got[1][:7] == got[4]
    assert got[2] != got[3] and got[2] != got[1][:7]


def test_samples_follow_the_models_distribution(build):
    """Two tokens deep, so the second is drawn from the cache."""
    model = wide_model("qwen3", vocab_size=12, eos_token_id=1)
    given, count = (3, 4, 5), 4000
    got = build(model, slots=64).generate([make_request(given, 2, seed=s, temperature=1.5) for s in range(count)])
    pairs = torch.stack([c.token_ids for c in got])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        first = torch.softmax(model(torch.tensor([given])).logits[0, -1] / 1.5, -1)
        branches = torch.tensor([[*given, token] for token in range(12)])
        second = torch.softmax(model(branches).logits[:, -1] / 1.5, -1)
    expected = (first[:, None] * second).flatten().double() * count
    counts = torch.bincount(pairs[:, 0] * 12 + pairs[:, 1], minlength=144).double()
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    assert len(counts) > 15
    assert chisquare(counts.numpy(), (expected / expected.sum() * count).numpy()).pvalue > 1e-3


def test_new_weights_are_used_at_once(build):
    model = wide_model("llama")
    engine = build(model)
    request = make_request(prompt(6), 10, temperature=0.0)
    before = engine.generate([request])[0].token_ids.tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    engine.sync(1)
    after = engine.generate([request])[0].token_ids.tolist()
    assert after == reference_greedy(model, request) != before
    assert engine.version == 1


def test_an_update_between_sleep_and_sync_is_in_the_very_next_sample(build):
    model = wide_model("qwen2")
    engine, request = build(model), make_request(prompt(40), 10, temperature=0.0)
    for step in range(1, 4):
        before = engine.generate([request])[0].token_ids.tolist()
        engine.sleep()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.8)
        engine.sync(step)
        assert engine.generate([request])[0].token_ids.tolist() == reference_greedy(model, request) != before


def test_broken_weights_give_no_sample_and_leave_no_trace(build):
    model = wide_model("llama")
    engine, request = build(model), make_request(prompt(40), 10, temperature=0.0)
    weight = model.model.layers[1].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        engine.sync(1)
        engine.generate([request])
    with torch.no_grad():
        weight.copy_(kept)
    engine.sync(2)
    (healed,) = engine.generate([request])
    assert healed.token_ids.tolist() == reference_greedy(model, request)
    torch.testing.assert_close(healed.log_probs, reference_log_probs(model, request, healed), atol=2e-5, rtol=1e-4)


def test_progress_counts_to_the_end_and_nothing_asked_is_nothing_made(build):
    engine, seen = build(wide_model("llama")), []
    engine.generate(
        [make_request(prompt(4), 1 + i, seed=i) for i in range(5)], lambda done, of: seen.append((done, of))
    )
    assert seen == [(i, 5) for i in range(1, 6)]
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request((), 5), "no prompt tokens"),
        (make_request((1, 2), 0), "max_tokens is 0"),
        (make_request((1, 2), 5, temperature=-0.5), "temperature is -0.5"),
        (make_request((1, 2), 5, top_p=0.0), "top_p is 0.0"),
        (make_request((1, 2), 5, top_k=-1), "top_k is -1"),
        (make_request((1, 200), 5), "token id 200 lies outside the model's vocabulary of 200"),
        (make_request((1,) * 300, 200, prefix=(2,) * 50), "= 550 exceed the context of 512: lower max_tokens to 162"),
        (make_request((1,) * 512, 1), "= 513 exceed the context of 512: shorten the prompt"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(build, request_, message):
    with pytest.raises(UserError, match=message) as caught:
        build(wide_model("llama")).generate([make_request((1, 2), 5), request_])
    assert "\n" not in str(caught.value)


def test_the_context_may_be_filled_to_the_last_token(build):
    model = wide_model("llama", max_position_embeddings=32)
    assert len(build(model).generate([make_request(prompt(20), 12)])[0].token_ids) == 12


def test_turns_of_a_conversation_are_drawn_as_if_each_were_asked_alone(build):
    """While a slow reply is awaited, the others go on to their ends."""
    engine = build(wide_model("llama"))
    talks = Talks([prompt(20), prompt(20), prompt(33, seed=1)], turns=3, tokens=6, slow=[1], longest=100)
    engine.serve(talks)
    assert [talks.log.count(i) for i in range(3)] == [3, 3, 3] and talks.log[-2:] == [1, 1]
    assert_drawn_alone(engine, talks)
