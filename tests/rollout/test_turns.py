"""Two engines by turns: the native mixture's sequences, from engines that show nothing but what they drew."""

import math
import random

import pytest
import torch
from builders import make_model, make_request
from toy_overrides import (
    DRAFT_ALONE,
    EOS,
    GIVEN,
    LENGTH,
    RULES,
    SAMPLES,
    TEMPERATURE,
    VOCABULARY,
    chi_square,
    count,
    exact_distribution,
    exact_moments,
    plain_log_probs,
    toy_models,
    toy_requests,
    toy_tables,
)

from luffy.core.override_rules import Rule
from luffy.errors import UserError
from luffy.rollout import NativeEngine, SpeculativeEngine, TurnsEngine
from luffy.rollout.overrides.turns import check_log_probs
from luffy.types import Completion, Sampling


class TableEngine:
    """An engine as others are: its noise comes from the seed alone and starts anew with every request."""

    def __init__(self, table: dict) -> None:
        self.chances = {context: log_probs.exp().tolist() for context, log_probs in table.items()}

    def generate(self, requests, progress=None):
        return [self._continue(request) for request in requests]

    def _continue(self, request) -> Completion:
        noise, written, log_probs = random.Random(request.seed), [], []
        while len(written) < request.sampling.max_tokens and EOS not in written:
            chances = self.chances[(*request.prefix_ids, *written)]
            (token,) = noise.choices(range(VOCABULARY), chances)
            written.append(token)
            log_probs.append(math.log(chances[token]))
        return Completion(torch.tensor(written), torch.tensor(log_probs), "stop" if EOS in written else "length")


class Plain:
    """The native engine, and what it was asked."""

    def __init__(self, model) -> None:
        self.native, self.asked, self.versions = NativeEngine(model), [], []

    def generate(self, requests, progress=None):
        self.asked += requests
        return self.native.generate(requests, progress)

    def sync(self, version):
        self.versions.append(version)


@pytest.fixture(scope="module", params=[None, 1])
def drawn(request) -> tuple[int | None, list[Completion]]:
    draft, second = map(TableEngine, toy_tables())  # these have the temperatures in them
    return request.param, TurnsEngine(draft, second, RULES["mixture"], request.param).generate(toy_requests())


def test_sequences_follow_the_closed_form_of_the_native_rule(drawn):
    budget, completions = drawn
    assert chi_square(count(completions), exact_distribution(RULES["mixture"], budget)) > 1e-3
    assert chi_square(count(completions), exact_distribution(DRAFT_ALONE, None)) < 1e-6


def test_log_probs_are_the_writers_own_and_unknown_ones_say_so(drawn):
    budget, completions = drawn
    drafts, others = toy_tables()
    for completion in completions[:300]:
        sequence = tuple(completion.token_ids.tolist())
        for place, token in enumerate(sequence):
            overridden = bool(completion.overrides[place])
            exact = float((others if overridden else drafts)[sequence[:place]][token])
            assert float(completion.behavior_log_probs[place]) == pytest.approx(exact, abs=2e-5)
            assert math.isnan(completion.log_probs[place]) is overridden
            assert math.isnan(completion.guidance_log_probs[place]) is not overridden
        assert budget is None or int(completion.overrides.sum()) <= budget


def test_weights_given_the_coins_bring_back_the_drafts_expectation(drawn):
    """As for the native rule, with d / g where the second model wrote and 1 elsewhere."""
    budget, completions = drawn
    drafts, _ = toy_tables()
    draft = exact_distribution(DRAFT_ALONE, None)
    entropy = -sum(p * math.log(p) for p in draft.values())
    weights, values = [], []
    for c in completions:
        s = tuple(c.token_ids.tolist())
        own = torch.tensor([float(drafts[s[:t]][token]) for t, token in enumerate(s)])
        weights.append(float((own - c.behavior_log_probs).sum().exp()))
        values.append(math.log(draft[s]) + entropy)
    weights, values = torch.tensor(weights), torch.tensor(values)
    for found in (weights - 1, weights * values):
        assert abs(float(found.mean())) < 3 * float(found.std()) / math.sqrt(SAMPLES) < 0.2
    assert abs(float(values.mean())) > 3 * float(values.std()) / math.sqrt(SAMPLES)
    marginal = sum(q for _, q in exact_moments(RULES["mixture"], budget).values())
    assert float(weights.square().mean()) > marginal  # the native rule's weights vary less


def test_coins_are_those_of_the_native_engine_and_turns_are_as_long_as_they_last():
    draft, second = map(Plain, toy_models())
    requests = [make_request(GIVEN, 12, seed=s, prefix=(2,) * (s % 3)) for s in range(40)]
    got = TurnsEngine(draft, second, Rule("mixture", eps=0.4), 3).generate(requests)
    native = SpeculativeEngine(*toy_models(), Rule("mixture", eps=0.4), max_overrides=3).generate(requests)
    assert [c.overrides.tolist() for c in got] == [c.overrides.tolist() for c in native]
    assert all(c.finish == "length" and len(c.token_ids) == 12 for c in got)
    changes = sum(int((c.overrides[1:] != c.overrides[:-1]).sum()) + 1 for c in got)
    assert len(draft.asked) + len(second.asked) == changes
    assert len({r.seed for r in draft.asked + second.asked}) == changes  # no turn repeats another's noise


def test_an_end_in_either_hand_ends_the_response():
    draft, second = map(Plain, toy_models())
    requests = [make_request(GIVEN, 40, seed=s, eos_ids=(1, 4)) for s in range(200)]
    got = TurnsEngine(draft, second, Rule("mixture", eps=0.5)).generate(requests)
    ends = {bool(c.overrides[-1]) for c in got if c.finish == "stop"}
    assert ends == {True, False}
    for c in got:
        ids = c.token_ids.tolist()
        assert not {1, 4} & set(ids[:-1]) and (c.finish == "stop") == (ids[-1] in (1, 4))


def test_eps_one_is_the_second_model_and_eps_zero_the_policy():
    draft, second = map(Plain, toy_models())
    engine = TurnsEngine(draft, second, Rule("mixture", eps=1.0), second_temperature=0.7)
    requests = [make_request(GIVEN, 6, seed=s, temperature=1.3) for s in range(5)]
    for eps, writer, temperature in ((1.0, second, 0.7), (0.0, draft, 1.3)):
        engine.rule = Rule("mixture", eps=eps)
        alone = writer.generate([make_request(GIVEN, 6, seed=s, temperature=temperature) for s in range(5)])
        assert [c.token_ids.tolist() for c in engine.generate(requests)] == [c.token_ids.tolist() for c in alone]
    engine.sync(7)
    assert draft.versions == [7] and second.versions == []
    assert engine.generate([]) == []


def test_progress_counts_to_the_end():
    seen = []
    engine = TurnsEngine(*map(Plain, toy_models()), RULES["mixture"])
    engine.generate([make_request(GIVEN, 1 + s, seed=s) for s in range(5)], lambda done, of: seen.append((done, of)))
    assert seen[-1] == (5, 5) and seen == sorted(seen)


def test_a_token_the_second_model_cannot_read_is_read_as_its_last():
    """The policy's padding: it may write it, and the behaviour stays what is reported."""
    draft, small = make_model("llama", seed=1, vocab_size=40), make_model("qwen2", seed=2, vocab_size=8)
    asks = Plain(small)
    engine = TurnsEngine(Plain(draft), asks, Rule("mixture", eps=0.5), second_vocabulary=8)
    got = engine.generate([make_request((3, 4), 10, seed=s) for s in range(6)])
    assert any(int(c.token_ids.max()) >= 8 for c in got)
    for c in got:
        ids = c.token_ids.tolist()
        log_g = plain_log_probs(small, [3, 4, *(min(i, 7) for i in ids)][:-1], 2)
        expected = log_g.gather(-1, c.token_ids.clamp(max=7)[:, None])[:, 0]
        torch.testing.assert_close(c.guidance_log_probs[c.overrides], expected[c.overrides], atol=5e-5, rtol=1e-4)


class Silent(Plain):
    def generate(self, requests, progress=None):
        return [
            Completion(c.token_ids, torch.full_like(c.log_probs, torch.nan), c.finish)
            for c in super().generate(requests)
        ]


class Empty(Plain):
    def generate(self, requests, progress=None):
        return [Completion(c.token_ids, torch.empty(0), c.finish) for c in super().generate(requests)]


@pytest.mark.parametrize("engine", [Silent, Empty])
def test_missing_log_probs_are_found_by_asking_for_one_token(engine):
    draft, second = toy_models()
    check_log_probs(Plain(draft), Sampling(LENGTH, TEMPERATURE))
    message = f"{engine.__name__} gave 1 tokens with 0 log-probs"
    with pytest.raises(UserError, match=message):
        check_log_probs(engine(draft), Sampling(LENGTH, TEMPERATURE))
    with pytest.raises(UserError, match="with 0 log-probs"):
        TurnsEngine(Plain(draft), engine(second), RULES["mixture"]).generate([make_request(GIVEN, 20)])


@pytest.mark.parametrize(
    ("rule", "instead"),
    [("speculative", "mixture with eps=1, which draws from the same"), ("threshold", "below tau.*rule=mixture")],
)
def test_rules_that_need_distributions_are_refused_by_name(rule, instead):
    draft, second = map(Plain, toy_models())
    with pytest.raises(UserError, match=f"rule {rule} cannot be honoured with the engine Plain.*{instead}") as caught:
        TurnsEngine(draft, second, RULES[rule])
    assert "\n" not in str(caught.value) and "native" in str(caught.value)


@pytest.mark.parametrize("knobs", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}])
def test_sampling_that_would_not_be_exact_is_refused(knobs):
    with pytest.raises(UserError, match=next(iter(knobs))):
        TurnsEngine(*map(Plain, toy_models()), RULES["mixture"]).generate([make_request(GIVEN, 4, **knobs)])
