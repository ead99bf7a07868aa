"""The second model on servers: for every rule that its log-probs suffice for, what the model in this process gives."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from builders import make_model, make_request, make_tokenizer
from fake_servers import KEY, FakeGenerator
from toy_overrides import (
    EOS,
    GIVEN,
    LENGTH,
    RULES,
    SAMPLES,
    SECOND_TEMPERATURE,
    TEMPERATURE,
    branches,
    chi_square,
    count,
    exact_distribution,
    plain_log_probs,
    toy_models,
    toy_requests,
    toy_tables,
)

from luffy.core.override_rules import Rule
from luffy.errors import TrainingStopped, UserError
from luffy.models.load import drop_padding_tokens
from luffy.rollout import NativeEngine, TurnsEngine
from luffy.rollout.overrides.aligned import AlignedEngine
from luffy.rollout.overrides.coupled import CoupledEngine
from luffy.rollout.vllm.http_client import Server
from luffy.rollout.vllm.served_model import ServedModel
from luffy.train.build_engines import scores_of

LONGEST, TOKENS = 64, 18


def second_model(rows=TOKENS + 3):
    """With rows of padding that are likely tokens."""
    return make_model("llama", seed=2, vocab_size=rows, initializer_range=0.2)


@pytest.fixture
def start():
    made = []

    def build(model=None, tokenizer=None, **knobs):
        made.append(FakeGenerator(model or second_model(), tokenizer or make_tokenizer(), **knobs))
        return made[-1]

    yield build
    for server in made:
        server.http.shutdown()
        server.http.server_close()


def served(*servers, **knobs):
    clients = [Server(s.url, KEY, 20, "rollout.offpolicy_guidance.servers") for s in servers]
    return ServedModel(clients, make_tokenizer(), LONGEST, slots=3, **knobs)


def pair_of(rule, draft, second, budget):
    if rule == "aligned":
        return AlignedEngine(draft, second, 0.8)
    if rule == "mixture":
        return TurnsEngine(draft, second, Rule("mixture", eps=0.4), budget, 0.8, second_vocabulary=TOKENS)
    return CoupledEngine(draft, second, scores_of(draft.model, 1.2, 100), budget, 0.8)


@pytest.mark.parametrize(
    ("rule", "budget"),
    [("mixture", None), ("mixture", 2), ("speculative", None), ("speculative", 2), ("aligned", None)],
)
def test_a_server_gives_what_the_model_in_this_process_gives(start, rule, budget):
    draft = NativeEngine(make_model("qwen2", seed=1, vocab_size=24, initializer_range=0.2))
    local = second_model()
    drop_padding_tokens(local, TOKENS)
    requests = [
        make_request((4, 13, 3 + s // 4), 12, seed=s, prefix=(5,) * (s % 2), temperature=1.2, eos_ids=(1, 9))
        for s in range(16)
    ]
    servers = served(start(), start())
    got = pair_of(rule, draft, servers, budget).generate(requests)
    expected = pair_of(rule, draft, NativeEngine(local), budget).generate(requests)
    assert {c.finish for c in got} == {"stop", "length"}
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist() and ours.finish == theirs.finish
        assert ours.overrides.tolist() == theirs.overrides.tolist()
        for name in ("log_probs", "behavior_log_probs", "guidance_log_probs"):
            torch.testing.assert_close(
                getattr(ours, name), getattr(theirs, name), atol=1e-5, rtol=0, equal_nan=True, msg=name
            )
    drawn = torch.cat([c.overrides for c in got])
    assert 0 < int(drawn.sum()) < drawn.numel()
    assert budget is None or max(int(c.overrides.sum()) for c in got) == budget
    assert max(int(c.token_ids[c.overrides].max()) for c in got if c.overrides.any()) < TOKENS


# ---- the rule speculative, from what a second model drew


@pytest.fixture(scope="module", params=[None, 1])
def coupled(request):
    draft, second = map(NativeEngine, toy_models())
    score = scores_of(draft.model, TEMPERATURE, 4096)
    engine = CoupledEngine(draft, second, score, request.param, SECOND_TEMPERATURE)
    return request.param, engine.generate(toy_requests())


def test_coupled_sequences_follow_the_closed_form_of_speculative(coupled):
    budget, completions = coupled
    assert chi_square(count(completions), exact_distribution(RULES["speculative"], budget)) > 1e-3
    assert chi_square(count(completions), exact_distribution(RULES["mixture"], budget)) < 1e-6


def test_coupled_overrides_are_those_of_speculative(coupled):
    """First tokens: kept with min(d, g), replaced with (g - d)+."""
    _, completions = coupled
    found = Counter((int(c.token_ids[0]), bool(c.overrides[0])) for c in completions)
    for token in range(6):
        stay, replaced, _ = branches(RULES["speculative"], (), token, 6)
        for overridden, chance in ((False, stay), (True, replaced)):
            error = math.sqrt(chance * (1 - chance) / SAMPLES)
            assert abs(found[token, overridden] / SAMPLES - chance) <= 4 * error + 1e-9


def test_coupled_log_probs_are_exact(coupled):
    budget, completions = coupled
    drafts, others = toy_tables()
    for completion in completions[:300]:
        sequence, spent = tuple(completion.token_ids.tolist()), 0
        for place, token in enumerate(sequence):
            d, g = (float(table[sequence[:place]][token]) for table in (drafts, others))
            alone = budget is not None and spent >= budget
            assert float(completion.log_probs[place]) == pytest.approx(d, abs=2e-5)
            assert float(completion.behavior_log_probs[place]) == pytest.approx(d if alone else g, abs=2e-5)
            assert math.isnan(completion.guidance_log_probs[place]) is alone
            spent += int(completion.overrides[place])
        assert budget is None or spent <= budget
        assert completion.finish == ("stop" if sequence[-1] == EOS else "length")
        assert len(sequence) == LENGTH or sequence[-1] == EOS


def test_without_overrides_the_policy_writes_alone():
    draft, second = map(NativeEngine, toy_models())
    requests = [make_request(GIVEN, 6, seed=s) for s in range(5)]
    got = CoupledEngine(draft, second, scores_of(draft.model, 1.0, 100), max_overrides=0).generate(requests)
    for ours, alone in zip(got, draft.generate(requests), strict=True):
        assert torch.equal(ours.token_ids, alone.token_ids) and not ours.overrides.any()
        assert torch.equal(ours.behavior_log_probs, alone.log_probs)


def test_equal_models_override_nothing():
    draft, _ = map(NativeEngine, toy_models())
    got = CoupledEngine(draft, draft, scores_of(draft.model, 1.0, 100)).generate(
        [make_request(GIVEN, 6, seed=s) for s in (1, 2)]
    )
    assert not any(c.overrides.any() for c in got)
    with pytest.raises(UserError, match="top_k"):
        CoupledEngine(draft, draft, scores_of(draft.model, 1.0, 100)).generate([make_request(GIVEN, 4, top_k=3)])


# ---- what is refused, and servers that are lost


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_server_that_does_not_fit_is_refused_in_one_line(start):
    with pytest.raises(
        UserError, match=rf"takes 40 tokens, but .* = {LONGEST}; raise rollout.vllm.max_context"
    ) as short:
        served(start(max_context=40))
    with pytest.raises(UserError, match="a model of 17 tokens, fewer than the tokenizer's 18; serve a model") as few:
        served(_with_rows(start(), 17))
    pushed = start()
    pushed.version = 3
    with pytest.raises(
        UserError, match="has weights that a run pushed to it.*restart it with `luffy serve`"
    ) as foreign:
        served(pushed)
    for error in (short, few, foreign):
        one_line(error)


def _with_rows(server, rows):
    server.config["vocab_size"] = rows
    return server


def test_another_tokenizer_is_refused_special_tokens_included(start):
    class Swapped:
        """Two digits change places, or the special tokens do."""

        def __init__(self, pair):
            self.inner, self.pair = make_tokenizer(), dict([pair, pair[::-1]])

        def __call__(self, text, **knobs):
            return {"input_ids": [self.pair.get(i, i) for i in self.inner(text, **knobs)["input_ids"]]}

        def __getattr__(self, name):
            return getattr(self.inner, name)

    own = make_tokenizer()
    special = own.eos_token_id
    for pair in ((5, 6), (special, 7)):
        with pytest.raises(UserError, match="the tokenizers differ: .* for the second model.; both must have") as error:
            served(start(tokenizer=Swapped(pair)))
        one_line(error)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"token_ids": [3, 4], "logprobs": {"token_logprobs": [-0.5]}}, "2 tokens with 1 log-probs"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "0 tokens with 0 log-probs"),
        ({"token_ids": [19], "logprobs": {"token_logprobs": [-0.5]}}, "a token 19 that the policy does not have"),
        ({"token_ids": [3], "logprobs": {"token_logprobs": [5.0]}}, "a log-prob of 5.0 for token 3"),
        ({"token_ids": [3], "logprobs": {"token_logprobs": [None]}}, "no log-prob of token 3"),
        ({"token_ids": [3], "logprobs": None}, "logprobs"),
        ({"text": "x"}, "token_ids"),
    ],
)
def test_an_answer_that_no_vllm_server_would_give_is_one_line(start, choice, message):
    server = start()
    engine = served(server)
    server.complete = lambda body: (200, {"choices": [choice]})
    with pytest.raises(UserError, match=message) as error:
        engine.generate([make_request((4, 5), 8)])
    assert "name a vLLM server in rollout.offpolicy_guidance.servers" in one_line(error)


def test_a_lost_server_is_made_up_for_and_the_last_one_ends_the_run(start):
    warnings, servers = [], (start(), start())
    engine = served(*servers, warn=warnings.append)
    requests = [make_request((4, 5, 3 + s), 6, seed=s) for s in range(8)]
    before = [c.token_ids.tolist() for c in engine.generate(requests)]
    servers[0].die_after = len(servers[0].asked) + 1
    assert [c.token_ids.tolist() for c in engine.generate(requests)] == before
    assert len(warnings) == 1 and "the second model's vLLM server" in warnings[0] and servers[0].url in warnings[0]
    servers[1].dead = True
    with pytest.raises(
        TrainingStopped, match="no vLLM server of the second model answers, of .*; start one again"
    ) as error:
        engine.generate(requests)
    one_line(error)
    with pytest.raises(UserError, match="the second model's vLLM server does not answer") as error:
        served(servers[1])
    one_line(error)
    assert engine.generate([]) == []


def test_a_request_beyond_the_context_is_refused(start):
    engine = served(start())
    with pytest.raises(UserError, match=f"exceed the context of {LONGEST}"):
        engine.generate([make_request((4, 5), LONGEST)])
    (seeded,) = engine.generate([replace(make_request((4, 5), 3), seed=2**64 - 1)])
    assert len(seeded.token_ids) == 3


@pytest.mark.vllm
def test_a_server_of_vllm_itself_gives_tokens_and_log_probs_of_its_model():
    """At a temperature, and without the 30 or more rows that the tokenizer does not have."""
    import vllm_engines
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model, known = make_model("llama", hidden_size=128), 20
    assert model.config.vocab_size > known + 30
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(known)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0")
    engine = ServedModel([vllm_engines.server_for(model, "scoring")], tokenizer, LONGEST, slots=4)
    drop_padding_tokens(model, known)
    requests = [
        make_request((4, 13, 3 + s // 4), 12, seed=s, prefix=(5,) * (s % 2), temperature=0.7) for s in range(16)
    ]
    for request, made in zip(requests, engine.generate(requests), strict=True):
        ids = made.token_ids
        assert len(ids) == 12 and int(ids.max()) < known
        log_g = plain_log_probs(model, [*request.given_ids, *ids.tolist()][:-1], request.start, 0.7)
        torch.testing.assert_close(made.log_probs, log_g.gather(-1, ids[:, None])[:, 0], atol=1e-3, rtol=1e-3)
