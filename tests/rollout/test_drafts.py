"""Drafts change no token: both native engines draw what they draw without, from good drafts and from bad ones."""

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import plain_kernels
import pytest
import torch
from builders import DEVICE, GPU_IF_THERE, make_model, make_request
from scipy.stats import chisquare
from talks import Talks, assert_drawn_alone
from trainings import samples, train_untimed

from luffy.config import Config, build
from luffy.errors import ConfigError, UserError
from luffy.models.attention import PackedLayout
from luffy.models.forward import forward_hidden
from luffy.rollout import NativeEngine
from luffy.rollout.native import Drafts
from luffy.rollout.native import drafts as drafts_of_rows
from luffy.rollout.native.draft_index import BYTES, MOST, NONE, Chunk
from luffy.rollout.native.drafts import KEPT_TEXTS, Drafter, DraftStore, standing
from luffy.rollout.native.scheduler import SequenceState
from luffy.types import Request, Sampling

pytestmark = GPU_IF_THERE
SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
WAYS = ["slots", "pages"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "pages":
        pytest.importorskip("triton")
        if DEVICE.type == "cpu":
            plain_kernels.install(monkeypatch)
    return request.param


@functools.cache
def toy(architecture="llama", **changes):
    return make_model(architecture, **{**SMALL, **changes}).to(DEVICE)


def with_drafts(requests, drafts):
    return [replace(request, drafts=drafts) for request in requests]


def assert_same(plain, drafted):
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.finish == theirs.finish
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-4, atol=1e-4)


def drawn_with(way, model, requests, drafts=None, **knobs):
    engine = NativeEngine(model, decoding=way, drafts=drafts or Drafts(always=True), **knobs)
    return engine.generate(requests), engine


def requests_of_all_kinds():
    """Greedy, tempered and filtered rows, an end of sequence, a prefix, responses of one token and of many."""
    return [
        make_request((3, 4, 5), 40, seed=1, eos_ids=(7, 9)), make_request((3, 4, 5), 40, seed=2, temperature=0.6),
        make_request((3, 4, 5), 30, seed=3, temperature=1.7), make_request((3, 4, 5), 25, temperature=0.0),
        make_request((3, 4, 5), 30, seed=4, top_p=0.7), make_request((3, 4, 5), 30, seed=5, top_k=3, temperature=0.8),
        make_request((3, 4, 5), 30, seed=6, prefix=(11, 12)), make_request((6,), 1, seed=7), make_request((6, 8), 90, seed=8),
    ]  # fmt: skip


@functools.cache
def drawn_without():
    return NativeEngine(toy(), decoding="slots").generate(requests_of_all_kinds())


def texts_of(completions):
    """The very responses, with tokens behind their ends."""
    return tuple((*completion.token_ids.tolist(), 5, 6, 5, 6) for completion in completions)


@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_good_drafts_change_no_token_and_save_passes(way, tokens):
    plain = drawn_without()
    requests = with_drafts(requests_of_all_kinds(), texts_of(plain))
    drafted, engine = drawn_with(way, toy(), requests, Drafts(tokens, always=True))
    assert_same(plain, drafted)
    assert engine.stats.generated_tokens == sum(len(c.token_ids) for c in plain)
    passes = engine.stats.decode_steps
    metrics = engine.metrics()
    assert metrics["rollout/draft_passes"].value == passes < 89 / (0.6 * tokens) + 4
    assert 0.7 * tokens < metrics["rollout/accepted_per_pass"].value <= tokens
    assert engine.metrics()["rollout/draft_passes"].value == 0


def test_bad_drafts_change_no_token(way):
    wrong = tuple(tuple((token + 1 + i % 2) % 40 for i, token in enumerate(text)) for text in texts_of(drawn_without()))
    assert_same(drawn_without(), drawn_with(way, toy(), with_drafts(requests_of_all_kinds(), wrong))[0])
    assert_same(drawn_without(), drawn_with(way, toy(), requests_of_all_kinds())[0])


def test_plain_steps_and_passes_go_on_from_one_another(way):
    """Rows that drop from many to few, and a pace that changes its mind."""
    requests = [make_request((3, 4, 5 + i % 3), 12 + 3 * i, seed=i, eos_ids=(7,)) for i in range(20)]
    plain = NativeEngine(toy(), decoding="slots").generate(requests)
    drafts, turn = Drafts(), iter(range(10_000))
    drafts.pace.tokens_for = lambda rows: 1 if rows > 8 or next(turn) // 3 % 2 else 4
    drafted, engine = drawn_with(way, toy(), with_drafts(requests, texts_of(plain)), drafts)
    assert_same(plain, drafted)
    assert 0 < engine.metrics()["rollout/draft_passes"].value < engine.stats.decode_steps


def test_the_same_rows_go_on_between_plain_steps_and_passes(way):
    requests = [make_request((3, 4, 5), 40, seed=i) for i in range(2)]
    drafts, turn = Drafts(), iter(range(10_000))
    drafts.pace.tokens_for = lambda rows: 1 if next(turn) // 2 % 2 else 4
    assert_same(NativeEngine(toy(), decoding="slots").generate(requests), drawn_with(way, toy(), requests, drafts)[0])


def test_few_slots_and_waiting_prompts(way):
    requests = [make_request((3 + i % 4, 4), 14, seed=i, eos_ids=(5, 6)) for i in range(10)]
    plain = NativeEngine(toy(), decoding="slots").generate(requests)
    assert_same(plain, drawn_with(way, toy(), with_drafts(requests, texts_of(plain)), max_slots=3)[0])
    assert_same(plain, drawn_with(way, toy(), with_drafts(requests, texts_of(plain)), max_slots=1)[0])


@pytest.mark.parametrize("slots", [1, 3])
def test_a_pass_may_be_repeated(monkeypatch, slots):
    """A GPU runs a pass before it captures it, and then the graph, from the same tokens."""
    pytest.importorskip("triton")
    from luffy.rollout.native.decode_graphs import Verifier

    if DEVICE.type == "cpu":
        plain_kernels.install(monkeypatch)
    once = Verifier._pass
    monkeypatch.setattr(Verifier, "_pass", lambda *args: (once(*args), once(*args))[1])
    requests = [make_request((3, 4), 14, seed=i) for i in range(3)]
    plain = NativeEngine(toy(), decoding="slots").generate(requests)
    assert_same(plain, drawn_with("pages", toy(), with_drafts(requests, texts_of(plain)), max_slots=slots)[0])


def test_a_window_and_the_end_of_the_context(way):
    model = toy("mistral", sliding_window=40, max_position_embeddings=192)
    requests = [make_request([3 + i % 30 for i in range(100)], 92, seed=seed) for seed in range(2)]
    plain = NativeEngine(model, decoding="slots").generate(requests)
    drafted, engine = drawn_with(way, model, with_drafts(requests, texts_of(plain)))
    assert_same(plain, drafted)
    assert engine.stats.decode_steps < 30


def test_pages_that_run_out(monkeypatch):
    pytest.importorskip("triton")
    from luffy.rollout.native import paged_generation

    if DEVICE.type == "cpu":
        plain_kernels.install(monkeypatch)
    requests = [make_request((3, 4, 5), 80, seed=i) for i in range(3)] + [make_request([6] * 60, 30, seed=9)]
    plain = NativeEngine(toy(), decoding="slots").generate(requests)
    monkeypatch.setattr(paged_generation, "pages_available", lambda *_: 5)
    drafted, engine = drawn_with("pages", toy(), with_drafts(requests, texts_of(plain)))
    assert_same(plain, drafted)
    assert engine.stats.preemptions > 0


def test_siblings_and_the_last_epoch_are_texts_too(way):
    """Equal seeds make equal siblings; a second call finds the responses of the first."""
    early = [make_request((3, 4, 5), 60, seed=1), make_request((3, 4, 5), 12, seed=2)]
    engine = NativeEngine(toy(), decoding=way, drafts=Drafts(always=True))
    first, alone = engine.generate(early), engine.stats.decode_steps
    assert_same(first, engine.generate(early))
    assert engine.stats.decode_steps < alone / 3
    late = NativeEngine(toy(), decoding=way, drafts=Drafts(always=True), max_slots=1)
    assert_same([first[0]] * 2, late.generate([early[0]] * 2))
    assert late.stats.decode_steps < 1.5 * alone, "the second follows the first, which has finished"


def test_parts_of_a_response_go_on_as_the_whole(way):
    """What partial rollouts do: the tokens so far are a prefix."""
    engine = NativeEngine(toy(), decoding=way, drafts=Drafts(always=True))
    whole = NativeEngine(toy(), decoding="slots").generate([make_request((3, 4, 5), 30, seed=1)])[0].token_ids.tolist()
    so_far = []
    for _ in range(3):
        (part,) = engine.generate([Request((3, 4, 5), 1, Sampling(10), tuple(so_far))])
        so_far += part.token_ids.tolist()
    assert so_far == whole
    (text,) = engine.drafts.store.texts((3, 4, 5))
    assert text.tokens.tolist() == [3, 4, 5, *whole], "each part takes the place of the one before"


def test_turns_of_a_conversation(way):
    engine = NativeEngine(toy("qwen2"), decoding=way, drafts=Drafts(always=True))
    talks = Talks([(3, 4, 5), (3, 4, 5), (6, 3)], tokens=9, longest=96)
    engine.serve(talks)
    assert engine.metrics()["rollout/draft_passes"].value > 0
    assert_drawn_alone(NativeEngine(toy("qwen2"), decoding="slots"), talks)


def test_adapters_and_a_change_of_weights(way):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model("llama", **SMALL), LoraConfig(target_modules=["q_proj", "up_proj"])).to(DEVICE)
    engine = NativeEngine(model, decoding=way, drafts=Drafts(always=True))
    requests = [make_request((3, 4, 5), 30, seed=i) for i in range(4)]
    engine.generate(requests)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    plain = NativeEngine(model, decoding="slots").generate(requests)
    assert_same(plain, engine.generate(requests))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_what_follows_a_draft_that_stands_has_its_distribution(way, temperature):
    """Every draft says the same second token, a likely one: the third ones behind it, against the model's softmax."""
    model, prompt = toy("llama", vocab_size=12), (5, 6, 7)
    requests = [make_request(prompt, 3, seed=i, temperature=temperature) for i in range(1000)]
    plain = NativeEngine(model, decoding="slots").generate(requests[:100])
    second = int(torch.stack([completion.token_ids for completion in plain])[:, 1].mode().values)
    texts = tuple((first, second, (first + 3) % 12) for first in range(12))
    completions, engine = drawn_with(way, model, with_drafts(requests, texts), max_slots=64)
    assert engine.metrics()["rollout/accepted_per_pass"].value > 1.03
    ids = [completion.token_ids.tolist() for completion in completions]
    behind = [(of_one[0], of_one[2]) for of_one in ids if of_one[1] == second]
    firsts = Counter(first for first, _ in behind)
    probs = {first: log_probs_after(model, (*prompt, first, second), temperature).double().exp() for first in firsts}
    expected = sum(count * probs[first] for first, count in firsts.items()).numpy()
    seen = np.bincount([third for _, third in behind], minlength=12)
    rare = expected < 5
    pairs = [*zip(seen[~rare], expected[~rare], strict=True), (seen[rare].sum(), expected[rare].sum())]
    observed, wanted = np.array([pair for pair in pairs if pair[1] > 0]).T
    assert len(behind) > 100 and chisquare(observed, wanted * len(behind) / wanted.sum()).pvalue > 1e-3


def log_probs_after(model, ids, temperature):
    layout = PackedLayout([len(ids)], DEVICE)
    with torch.no_grad():
        hidden = forward_hidden(model, torch.tensor(ids, device=DEVICE), layout.position_ids, layout)[-1]
        return torch.log_softmax(model.get_output_embeddings().weight @ hidden / temperature, -1).float().cpu()


def test_log_probs_are_the_trainers(way):
    completions, _ = drawn_with(way, toy(), with_drafts(requests_of_all_kinds(), texts_of(drawn_without())))
    for request, completion in zip(requests_of_all_kinds(), completions, strict=True):
        ids, temperature = completion.token_ids.tolist(), request.sampling.temperature or 1.0
        for place in range(0, len(ids), 7):
            there = log_probs_after(toy(), (*request.given_ids, *ids[:place]), temperature)[ids[place]]
            assert float(completion.log_probs[place]) == pytest.approx(float(there), abs=2e-5)


def test_nan_weights_are_named(way):
    model = make_model("llama", **SMALL).to(DEVICE)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match="request 0"):
        drawn_with(way, model, [make_request((3, 4), 9)])


def test_the_store_stays_within_its_memory_and_drops_the_oldest_problem():
    store = DraftStore(limit=1000)
    for i in range(100):
        store.add((i % 7,), np.arange(50, dtype=np.int32), given=0)
        assert store.bytes == sum(t.tokens.nbytes for key in range(7) for t in store.texts((key,))) <= 1000
    assert len(store.texts((99 % 7,))) == 1 and not store.texts((95 % 7 + 7,))
    kept = [key for key in range(7) if store.texts((key,))]
    assert kept == sorted(i % 7 for i in range(95, 100))
    for i in range(KEPT_TEXTS + 3):
        store.add((9,), np.array([i], dtype=np.int32), given=0)
    assert [int(text.tokens[0]) for text in store.texts((9,))] == list(range(3, KEPT_TEXTS + 3))


def test_a_problem_that_is_asked_again_has_not_waited():
    store = DraftStore(limit=16)
    for key in "abacd":
        store.add((ord(key),), np.zeros(1, dtype=np.int32), given=0)
    assert [len(store.texts((ord(key),))) for key in "abcd"] == [2, 0, 1, 1]


def test_only_a_response_that_goes_on_takes_the_place_of_its_beginning():
    store = DraftStore(limit=1000)
    for length, given in ((2, 0), (3, 0), (4, 1)):
        store.add((9,), np.arange(length, dtype=np.int32), given)
    assert [len(text.tokens) for text in store.texts((9,))] == [3, 4]


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def proposed(drafter, row, *tokens):
    """The draft of a row that has drawn these too."""
    row.token_ids.extend(tokens)
    return drafter.propose([row], 3)[0].tolist()


@pytest.mark.parametrize("small", [8192, 12, 0])  # at 0 all is sorted again each time
def test_a_row_follows_each_kind_of_text_however_often_they_are_sorted(monkeypatch, small):
    monkeypatch.setattr(drafts_of_rows, "SMALL", small)
    monkeypatch.setattr(drafts_of_rows, "GROWTH", 1)
    drafts, prompt = Drafts(), (3, 4, 5, 6)
    drafts.store.add(prompt, ids(*prompt, 20, 21, 22, 23, 24), given=0)
    drafter, (request,) = Drafter(drafts), with_drafts([make_request(prompt, 99)], ((10, 11, 12, 13, 14),))
    row = SequenceState(0, request)
    for first in range(60, 80, 4):
        proposed(drafter, row, *range(first, first + 4))
    assert proposed(drafter, row, 10, 11) == [12, 13, 14], "a trace"
    assert proposed(drafter, row, 20, 21) == [22, 23, 24], "an earlier response"
    assert proposed(drafter, row, 3, 4) == [5, 6, NONE], "the prompt"
    assert proposed(drafter, row, 60, 61)[:2] == [62, 63], "its own tokens"


def test_the_first_tokens_of_a_row_match_behind_its_prompt():
    drafts, prompt = Drafts(), (3, 4, 5, 6)
    for text in ((10, 40, 41, 42), (50, 6, 10, 43, 44)):
        drafts.store.add(prompt, ids(*prompt, *text), given=0)
    assert proposed(Drafter(drafts), SequenceState(0, make_request(prompt, 9)), 10) == [40, 41, 42]


def test_a_response_is_in_the_index_once():
    drafts, request = Drafts(), make_request((3, 4, 5), 9)
    drafter, first, second = Drafter(drafts), SequenceState(0, request), SequenceState(1, request)
    proposed(drafter, first, 10, 11, 12)
    drafter.keep([first])
    proposed(drafter, second, 20)
    assert len(drafter._new) == 1 + 3 + 1, "places of the prompt and the two rows"
    drafter.keep([SequenceState(2, request)])
    assert len(drafts.store.texts((3, 4, 5))) == 2


def test_memory_is_halved_between_texts_and_index_and_its_two_parts():
    drafts = Drafts(memory_mb=2)
    assert drafts.store.limit == drafts.index_bytes == 1 << 20
    chunks = [Chunk(0, ids(*range(length))) for length in (2, 4)]
    for tokens, kept in ((3 + MOST, []), (4 + MOST, chunks[1:]), (5 + 2 * MOST, chunks[1:]), (6 + 2 * MOST, chunks)):
        drafts.index_bytes = 2 * BYTES * tokens
        assert Drafter(drafts)._within_limit(chunks) == kept


def test_the_pace_hears_of_prompts_and_of_each_plain_step(way):
    requests = [make_request((3, 4, 5 + i % 3), 12 + 3 * i, seed=i, eos_ids=(7,)) for i in range(12)]
    drafts, turn, heard, steps = Drafts(), iter(range(10_000)), [], []
    drafts.pace.tokens_for = lambda rows: 1 if rows > 8 or next(turn) // 3 % 2 else 4
    drafts.pace.interrupted = lambda: heard.append(1)
    drafts.pace.stepped = lambda rows, count: steps.append(count)
    _, engine = drawn_with(way, toy(), requests, drafts)
    assert heard and 0 < sum(steps) == engine.stats.decode_steps - engine.metrics()["rollout/draft_passes"].value


def test_little_memory_costs_drafts_and_no_token(way):
    drafts = Drafts(always=True)
    drafts.index_bytes, drafts.store.limit = 24 * 100, 400
    requests = with_drafts(requests_of_all_kinds(), texts_of(drawn_without()))
    drafted, engine = drawn_with(way, toy(), requests, drafts)
    assert_same(drawn_without(), drafted)
    assert drafts.store.bytes <= 400
    assert 1 <= engine.metrics()["rollout/accepted_per_pass"].value < 6


def test_what_stands_ends_with_the_first_other_token():
    drafts = np.array([[4, 5, 6], [4, 5, 6], [4, -1, -1], [9, 5, 6]], dtype=np.int32)
    drawn_tokens = np.array([[4, 5, 6, 7], [4, 8, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]])
    assert standing(drafts, drawn_tokens).tolist() == [4, 2, 2, 1]


def test_drafts_are_refused_where_they_cannot_be():
    with pytest.raises(UserError, match="batch_invariant excludes drafts"):
        NativeEngine(toy(), batch_invariant=True, drafts=Drafts())
    auto = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "rollout": {"drafts": {"when": "auto"}}}
    assert build(Config, auto).rollout.drafts.tokens == 8
    for other, message in (
        ({"engine": "vllm"}, "is the native engine's and 'rollout.engine' is vllm"),
        ({"offpolicy_guidance": {"model_path": "m"}}, "set rollout.drafts.when=never"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(Config, {**auto, "rollout": {**auto["rollout"], **other}})


@pytest.mark.parametrize(
    "changes", [{}, {"rollout": {"max_tokens_per_step": 5, "n": 2}}, {"async": {"max_staleness": 1}}]
)
def test_a_training_has_the_samples_of_one_without(make_config, changes):
    """Weights hardly move, so that rounding has no steps to grow in."""
    common = {"optim": {"lr": 1e-30}, "train": {"steps": 3}, "record": {"samples": 30, "samples_every": 1}}
    found = {}
    for when in ("never", "always"):
        rollout = {**changes.get("rollout", {}), "drafts": {"when": when}}
        cfg = make_config(name=when, **common, **{**changes, "rollout": rollout})
        rows = train_untimed(cfg)
        shown = when == "always" and "async" not in changes  # nobody asks an engine that rolls out ahead
        assert all(("rollout/accepted_per_pass" in row) == shown for row in rows)
        found[when] = [(row["problem"], row["step"], row["token_ids"]) for row in samples(cfg)]
    assert "async" in changes or rows[0]["rollout/draft_passes"] > 0
    assert found["always"] == found["never"] and len(found["never"]) > 3
