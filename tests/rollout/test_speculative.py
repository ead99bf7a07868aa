"""Token overrides: the tokens follow the rule's closed form, and the reported probabilities are it."""

import math

import pytest
import torch
from builders import ARCHITECTURES, make_model, make_request
from toy_overrides import (
    DRAFT_ALONE,
    RULES,
    SAMPLES,
    VOCABULARY,
    chi_square,
    count,
    exact_distribution,
    exact_moments,
    plain_log_probs,
    toy_models,
    toy_samples,
    toy_sequences,
    toy_tables,
)
from transformers import BloomConfig

from luffy.core.override_rules import Rule
from luffy.errors import UserError
from luffy.models.attention import ExtendLayout
from luffy.models.forward import forward_hidden
from luffy.rollout import NativeEngine, SpeculativeEngine
from luffy.rollout.native.slot_cache import SlotCache
from luffy.types import Completion, Request


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


# A budget of overrides, and a second model that lacks a token which the policy has (in earnest: padding).
VARIANTS = pytest.mark.parametrize(("budget", "known"), [(None, VOCABULARY), (1, VOCABULARY), (None, VOCABULARY - 1)])


@VARIANTS
@pytest.mark.parametrize("name", RULES)
def test_sequences_follow_the_closed_form(name, budget, known):
    counts = count(toy_samples(name, budget, known))
    expected = exact_distribution(RULES[name], budget, known)
    assert set(counts) <= set(expected)
    assert chi_square(counts, expected) > 1e-3
    # The test can tell: the draft alone does not look like this.
    assert chi_square(counts, exact_distribution(DRAFT_ALONE, None)) < 1e-6


def test_speculative_is_the_second_model_itself():
    _, others = toy_tables()
    alone = {s: math.exp(sum(float(others[s[:i]][y]) for i, y in enumerate(s))) for s in toy_sequences()}
    assert exact_distribution(RULES["speculative"], None) == pytest.approx(alone, abs=1e-6)
    completions = toy_samples("speculative", None)
    assert all(torch.equal(c.behavior_log_probs, c.guidance_log_probs) for c in completions)
    assert chi_square(count(completions), alone) > 1e-3


@VARIANTS
@pytest.mark.parametrize("name", RULES)
def test_reported_log_probs_are_the_closed_form_of_plain_forward_passes(name, budget, known):
    drafts, others = toy_tables(known)
    rule = RULES[name]
    for completion in toy_samples(name, budget, known)[:300]:
        sequence, spent = tuple(completion.token_ids.tolist()), 0
        for place, token in enumerate(sequence):
            log_d, log_g = drafts[sequence[:place]], others[sequence[:place]]
            free = budget is None or spent < budget
            behavior = rule.behavior_log_probs(log_d, log_g, torch.tensor(token)) if free else log_d[token]
            assert float(completion.log_probs[place]) == pytest.approx(float(log_d[token]), abs=2e-5)
            assert float(completion.guidance_log_probs[place]) == pytest.approx(float(log_g[token]), abs=2e-5)
            assert float(completion.behavior_log_probs[place]) == pytest.approx(float(behavior), abs=2e-5)
            spent += bool(completion.overrides[place])
        assert budget is None or spent <= budget


@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("name", RULES)
def test_importance_weights_bring_back_the_drafts_expectation(name, budget):
    """Of the draft's log-prob of a sequence (its entropy) and of 1; standard errors are the exact ones,
    since weights have long tails and a sample underrates its own spread."""
    draft = exact_distribution(DRAFT_ALONE, None)
    entropy = -sum(p * math.log(p) for p in draft.values())
    value = {sequence: math.log(p) + entropy for sequence, p in draft.items()}  # its mean is 0
    moments = exact_moments(RULES[name], budget)
    completions = toy_samples(name, budget)
    values = torch.tensor([value[tuple(c.token_ids.tolist())] for c in completions]).double()
    weights = torch.stack([(c.log_probs.double() - c.behavior_log_probs.double()).sum().exp() for c in completions])
    error = math.sqrt(sum(q * value[s] ** 2 for s, (_, q) in moments.items()) / SAMPLES)
    assert error < 0.05 and abs(float((weights * values).mean())) < 3 * error
    error = math.sqrt((sum(q for _, q in moments.values()) - 1) / SAMPLES)
    assert error < 0.05 and abs(float(weights.mean()) - 1) < 3 * error
    # Without the weights the answer is another one.
    assert abs(float(values.mean())) > 3 * float(values.std()) / math.sqrt(SAMPLES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_equal_plain_forward_passes_in_every_architecture(architecture):
    draft, second = make_model("llama", seed=1), make_model(architecture, seed=2)
    if architecture == "llama":  # the draft's sliding window too, and another shape on either side
        draft = make_model("mistral", seed=1, hidden_size=32, num_hidden_layers=2)
    rule = Rule("mixture", eps=0.2)
    requests = [make_request(range(5, 9 + 4 * s), 20, seed=s, temperature=1.0 + 0.2 * s) for s in range(5)]
    got = SpeculativeEngine(draft, second, rule, k=3, max_slots=3).generate(requests)
    for request, completion in zip(requests, got, strict=True):
        ids, start = [*request.prompt_ids, *completion.token_ids.tolist()], len(request.prompt_ids)
        temperature, tokens = request.sampling.temperature, completion.token_ids
        log_d, log_g = (plain_log_probs(m, ids[:-1], start, temperature) for m in (draft, second))
        close = {"atol": 5e-5, "rtol": 1e-4}
        torch.testing.assert_close(completion.log_probs, log_d.gather(-1, tokens[:, None])[:, 0], **close)
        torch.testing.assert_close(completion.guidance_log_probs, log_g.gather(-1, tokens[:, None])[:, 0], **close)
        torch.testing.assert_close(
            completion.behavior_log_probs, rule.behavior_log_probs(log_d, log_g, tokens), **close
        )
        assert completion.overrides.dtype == torch.bool and completion.behavior_log_probs.dtype == torch.float32
    assert any(c.overrides.any() for c in got) and not all(c.overrides.all() for c in got)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_extending_a_cache_equals_running_the_whole(architecture):
    """Uneven rows, rejected leftovers in the cache, past the sliding window."""
    model = make_model(architecture)
    lengths, ids = (3, 12, 9), torch.randint(3, 200, (3, 20), generator=torch.Generator().manual_seed(0))
    cache = SlotCache(3, 3, 32)
    spoiled = torch.arange(20).expand(3, -1)
    with torch.no_grad():
        forward_hidden(model, ids.flatten() % 7, spoiled.flatten(), ExtendLayout(cache, spoiled, 32))
        starts = torch.tensor(lengths)[:, None]
        for row, length in enumerate(lengths):  # the true beginnings, over the leftovers
            one = _Row(cache, row)
            at = torch.arange(length)[None]
            forward_hidden(model, ids[row, :length], at[0], ExtendLayout(one, at, 32))
        positions = starts + torch.arange(4)
        tokens = ids.gather(1, positions)
        got = forward_hidden(model, tokens.flatten(), positions.flatten(), ExtendLayout(cache, positions, 32)).view(
            3, 4, -1
        )
        model.set_attn_implementation("eager")
        for row, length in enumerate(lengths):
            expected = model.model(ids[None, row, : length + 4]).last_hidden_state[0, length:]
            torch.testing.assert_close(got[row], expected, atol=2e-5, rtol=1e-4)


class _Row:
    """One slot of a cache as a cache of its own."""

    def __init__(self, cache: SlotCache, row: int) -> None:
        self.cache, self.row = cache, row

    def write(self, layer, keys, values, slots, positions):
        self.cache.write(layer, keys, values, slots + self.row, positions)

    def read(self, layer, rows, span):
        keys, values = self.cache.read(layer, self.row + 1, span)
        return keys[self.row :], values[self.row :]


def mixed_requests() -> list[Request]:
    """Prompts shared by several samples, uneven lengths, prefixes, one-token responses, early ends."""
    requests = [
        make_request(range(10 + p, 20 + p), 1 + 3 * s, seed=s, eos_ids=(2, 50, 60)) for p in range(3) for s in range(4)
    ]
    requests += [make_request(range(10, 20), 9, seed=s, prefix=(7, 8), temperature=1.3) for s in range(3)]
    return [*requests, make_request((5,), 16, seed=1), make_request(range(3, 90), 2, seed=2)]


def spread_models():
    """Two models near enough for long agreement and far enough for overrides."""
    return make_model("llama", seed=1, initializer_range=0.05), make_model("qwen3", seed=2, initializer_range=0.05)


@pytest.mark.parametrize(
    ("rule", "budget"), [(Rule("mixture", eps=0.0), None), (Rule("threshold", tau=0.0), None), (Rule("speculative"), 0)]
)
def test_without_overrides_it_is_the_native_engine(rule, budget):
    draft, second = spread_models()
    expected = NativeEngine(draft, max_slots=7).generate(mixed_requests())
    engine = SpeculativeEngine(draft, second, rule, k=3, max_overrides=budget, max_slots=7)
    got = engine.generate(mixed_requests())
    for a, b in zip(expected, got, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.finish == b.finish
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=2e-5, rtol=1e-4)
        assert torch.equal(b.behavior_log_probs, b.log_probs) and not b.overrides.any()
    assert engine.stats.prefilled_prompts == 6
    assert engine.stats.accepted == engine.stats.generated_tokens == sum(len(c.token_ids) for c in got)


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("name", RULES)
def test_neither_k_nor_company_changes_the_tokens(name, budget):
    draft, second = spread_models()
    rule = Rule("threshold", tau=0.005) if name == "threshold" else RULES[name]
    runs = [
        SpeculativeEngine(draft, second, rule, k=k, max_overrides=budget, max_slots=slots).generate(mixed_requests())
        for k, slots in ((1, 32), (2, 3), (5, 7))
    ]
    for other in runs[1:]:
        assert tokens_of(other) == tokens_of(runs[0])
        for a, b in zip(runs[0], other, strict=True):
            assert torch.equal(a.overrides, b.overrides)
            torch.testing.assert_close(a.behavior_log_probs, b.behavior_log_probs, atol=5e-5, rtol=1e-4)
    spent = [int(c.overrides.sum()) for c in runs[0]]
    assert 0 < sum(spent) < sum(len(c.token_ids) for c in runs[0])
    if budget is not None:
        assert max(spent) == budget
        for completion in runs[0]:
            alone = completion.overrides.long().cumsum(0) - completion.overrides.long() >= budget
            assert torch.equal(completion.behavior_log_probs[alone], completion.log_probs[alone])


def test_equal_models_agree_on_everything():
    draft = make_model("llama", seed=1)
    engine = SpeculativeEngine(draft, draft, Rule("speculative"), k=4, max_slots=8)
    got = engine.generate([make_request((5, 6, 7), 13, seed=s) for s in range(8)])
    assert tokens_of(got) == tokens_of(
        NativeEngine(draft).generate([make_request((5, 6, 7), 13, seed=s) for s in range(8)])
    )
    stats = engine.stats
    # The first token comes from the prefill, then 12 in rounds of 4.
    assert (stats.decode_steps, stats.second_passes, stats.overrides) == (12, 3, 0)
    assert (stats.proposals, stats.accepted, stats.mean_accepted_length) == (8 * 13, 8 * 13, 4.0)


def test_counts_add_up():
    draft, second = spread_models()
    engine = SpeculativeEngine(draft, second, Rule("mixture", eps=0.2), k=4, max_slots=5)
    got = engine.generate(mixed_requests())
    stats = engine.stats
    assert stats.generated_tokens == sum(len(c.token_ids) for c in got) == stats.accepted + stats.overrides
    assert stats.overrides == sum(int(c.overrides.sum()) for c in got)
    assert stats.proposals >= stats.generated_tokens and 0 < stats.mean_accepted_length < 4
    assert stats.second_passes < stats.decode_steps <= 4 * stats.second_passes


def test_one_transfer_to_the_host_per_round(monkeypatch):
    counted = []
    plain = torch.Tensor.tolist
    engine = SpeculativeEngine(*spread_models(), Rule("mixture", eps=0.3), max_overrides=2, max_slots=4)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: counted.append(1) or plain(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a scalar was read back"))
    engine.generate([make_request((5, 6), 10, seed=i) for i in range(4)])
    assert len(counted) == 1 + engine.stats.second_passes


def test_a_prefix_continues_exactly_where_it_was_cut():
    draft, second = spread_models()
    engine = SpeculativeEngine(draft, second, Rule("mixture", eps=0.4), k=4)
    full = engine.generate([make_request((5, 6, 7), 20, seed=3)])[0]
    ids = full.token_ids.tolist()
    cut = [make_request((5, 6, 7), 20 - n, seed=3, prefix=ids[:n]) for n in (1, 7, 19)]
    for n, rest in zip((1, 7, 19), engine.generate(cut), strict=True):
        assert rest.token_ids.tolist() == ids[n:] and torch.equal(rest.overrides, full.overrides[n:])
        torch.testing.assert_close(rest.behavior_log_probs, full.behavior_log_probs[n:], atol=2e-5, rtol=1e-4)


def test_an_end_inside_a_round_ends_the_response():
    draft, second = spread_models()
    engine = SpeculativeEngine(draft, second, Rule("mixture", eps=0.2), k=5)
    ids = engine.generate([make_request((5, 6, 7), 20, seed=3)])[0].token_ids.tolist()
    ends = [make_request((5, 6, 7), 20, seed=3, eos_ids=(token,)) for token in ids]
    for end, got in enumerate(engine.generate(ends)):
        assert got.finish == "stop" and got.token_ids.tolist() == ids[: ids.index(ids[end]) + 1]
        assert len(got.overrides) == len(got.guidance_log_probs) == len(got.behavior_log_probs) == len(got.token_ids)


def test_the_context_may_be_filled_to_the_last_token():
    draft = make_model("llama", max_position_embeddings=32)
    second = make_model("qwen2", max_position_embeddings=32)
    requests = [make_request(range(3, 23), 12), make_request((5,), 31)]
    got = SpeculativeEngine(draft, second, Rule("mixture", eps=0.2), k=7).generate(requests)
    assert [len(c.token_ids) for c in got] == [12, 31]
    for request, completion in zip(requests, got, strict=True):
        ids = [*request.prompt_ids, *completion.token_ids.tolist()]
        for model, reported in ((draft, completion.log_probs), (second, completion.guidance_log_probs)):
            expected = plain_log_probs(model, ids[:-1], len(request.prompt_ids)).gather(
                -1, completion.token_ids[:, None]
            )
            torch.testing.assert_close(reported, expected[:, 0], atol=5e-5, rtol=1e-4)


def test_padding_of_the_policy_is_never_put_in_and_never_asked_for():
    draft, second = toy_models(VOCABULARY - 1)
    for name in RULES:
        seen = [c for c in toy_samples(name, None, VOCABULARY - 1) if VOCABULARY - 1 in c.token_ids.tolist()]
        for completion in seen:
            at = completion.token_ids == VOCABULARY - 1
            assert not completion.overrides[at].any() and (completion.guidance_log_probs[at] == -math.inf).all()
        # Its probability is the policy's: mixture keeps a share of it, the others reject what the second model never says.
        assert bool(seen) is (name == "mixture")
    with pytest.raises(UserError, match=f"token id {VOCABULARY - 1} lies outside"):
        SpeculativeEngine(draft, second, RULES["mixture"]).generate([make_request((VOCABULARY - 1,), 3)])


def test_the_rule_may_change_between_calls():
    engine = SpeculativeEngine(*spread_models(), Rule("mixture", eps=0.0))
    requests = [make_request((5, 6, 7), 30, seed=s) for s in range(4)]
    shares = []
    for eps in (0.0, 0.3, 1.0):
        engine.rule = Rule("mixture", eps=eps)
        shares.append(float(torch.cat([c.overrides for c in engine.generate(requests)]).float().mean()))
    assert shares[0] == 0.0 and 0.15 < shares[1] < 0.45 and shares[2] == 1.0


@pytest.mark.slow
def test_batch_invariance_is_to_the_bit():
    draft, second = (model.to(torch.bfloat16) for model in spread_models())
    mine = [make_request(range(10, 30 + s), 12, seed=s) for s in range(3)]
    others = [make_request(range(40, 60 + 20 * s), 20, seed=s) for s in range(5)]
    engine = SpeculativeEngine(draft, second, Rule("speculative"), k=3, max_slots=6, batch_invariant=True)
    alone = [engine.generate([request])[0] for request in mine]
    crowd = engine.generate([*others[:3], *mine, *others[3:]])[3:6]
    for a, b in zip(alone, crowd, strict=True):
        assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.behavior_log_probs, b.behavior_log_probs)


def test_training_state_of_both_comes_back():
    draft, second = spread_models()
    draft.train()
    second.model.layers[1].train()
    modes = [m.training for model in (draft, second) for m in model.modules()]
    SpeculativeEngine(draft, second, RULES["mixture"]).generate([make_request((5, 6), 5)])
    assert [m.training for model in (draft, second) for m in model.modules()] == modes


@pytest.mark.parametrize("broken", ["policy", "second model"])
@pytest.mark.parametrize("name", RULES)
def test_broken_weights_name_the_model(broken, name):
    draft, second = spread_models()
    with torch.no_grad():
        (draft if broken == "policy" else second).model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=f"the {broken} gave NaN logits for request 0 after 3 tokens"):
        SpeculativeEngine(draft, second, RULES[name]).generate([make_request((5, 6, 7), 4)])


def test_bad_settings_are_refused():
    draft, rule = make_model("llama"), RULES["speculative"]
    for knobs, message in (
        ({"k": 0}, "k is 0"),
        ({"max_overrides": -1}, "max_overrides is -1"),
        ({"second_temperature": 0.0}, "second_temperature is 0.0"),
        ({"max_slots": 0}, "max_slots is 0"),
    ):
        with pytest.raises(UserError, match=message):
            SpeculativeEngine(draft, draft, rule, **knobs)
    with pytest.raises(UserError, match="vocabulary of 200 tokens, the second model of 210.*drop_padding_tokens"):
        SpeculativeEngine(draft, make_model("llama", vocab_size=210), rule)
    short = make_model("llama", max_position_embeddings=128)
    with pytest.raises(
        UserError, match="takes 128 tokens, less than the context of 512: set max_context to at most 128"
    ):
        SpeculativeEngine(draft, short, rule)
    assert SpeculativeEngine(draft, short, rule, max_context=128).policy.max_context == 128
    short.config = BloomConfig(vocab_size=200)  # which has no limit
    assert SpeculativeEngine(draft, short, rule).policy.max_context == 512


@pytest.mark.parametrize(
    ("knobs", "message"),
    [({"temperature": 0.0}, "temperature is 0"), ({"top_p": 0.9}, "top_p is 0.9"), ({"top_k": 5}, "top_k is 5")],
)
def test_sampling_that_would_not_be_exact_is_refused(knobs, message):
    engine = SpeculativeEngine(make_model("llama"), make_model("llama"), RULES["speculative"])
    with pytest.raises(UserError, match=message) as caught:
        engine.generate([make_request((5, 6), 4), make_request((5, 6), 4, **knobs)])
    assert "\n" not in str(caught.value)
