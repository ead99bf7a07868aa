"""The paged engine draws what the slot engine draws; on a CPU with plain torch in the place of its kernels."""

import copy
import functools
import warnings
from types import SimpleNamespace

import plain_kernels
import pytest
import torch
from builders import DEVICE, GPU_IF_THERE, make_model, make_request

pytest.importorskip("triton")

from luffy.errors import UserError
from luffy.kernels.paged import PAGE
from luffy.models.forward import fused_decoder
from luffy.rollout import NativeEngine
from luffy.rollout.native import native_engine, paged_generation
from luffy.rollout.native.paged_cache import PagedCache, PagePool

pytestmark = GPU_IF_THERE
SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def fast_on_a_cpu(monkeypatch):
    if DEVICE.type == "cpu":
        plain_kernels.install(monkeypatch)


def small(architecture="llama", **changes):
    return make_model(architecture, **{**SMALL, **changes}).to(DEVICE)


def both(model, requests, **knobs):
    slots = NativeEngine(model, decoding="slots").generate(requests)
    engine = NativeEngine(model, decoding="pages", **knobs)
    return slots, engine.generate(requests), engine


def assert_same_tokens(slots, pages):
    for ours, theirs in zip(pages, slots, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.finish == theirs.finish
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_pages_draw_what_slots_draw(architecture):
    model = small(architecture)
    requests = [
        make_request(range(3, 9), 12, seed=1), make_request(range(3, 9), 4, seed=2, temperature=0.7),
        make_request(range(5, 5 + 30), 10, seed=3, prefix=(4, 5)), make_request((7,), 1, seed=4), make_request((7,), 9, temperature=0.0),
    ]  # fmt: skip
    slots, pages, engine = both(model, requests)
    assert_same_tokens(slots, pages)
    assert engine.stats.generated_tokens == 12 + 4 + 10 + 1 + 9
    assert engine.stats.prefilled_prompts == 3 and engine.stats.prefill_tokens == 6 + 32 + 1


def test_a_window_over_several_pages():
    model = small("mistral", sliding_window=70)
    assert_same_tokens(*both(model, [make_request([3 + i % 30 for i in range(100)], 40, seed=1)])[:2])


def test_few_rows_and_ends_of_sequence():
    model = small()
    requests = [make_request((3 + i % 3, 4), 20, seed=i, eos_ids=(5, 6)) for i in range(10)]
    slots, pages, engine = both(model, requests, max_slots=3)
    assert_same_tokens(slots, pages)
    assert {c.finish for c in pages} == {"stop", "length"}
    assert engine.stats.generated_tokens == sum(len(c.token_ids) for c in pages)


def test_who_takes_the_finished_ones_takes_them_together_while_the_next_run():
    model = small()
    requests = [make_request((3 + i, 4), 20, seed=i) for i in range(6)]
    engine = NativeEngine(model, decoding="pages", max_slots=3)
    with torch.no_grad():
        generation = engine._generation(requests)
        prompts, seen = list(generation._prompts._waiting), []
        for part in generation.run():
            assert all(prompt.waiting or prompt.first_logits is None for prompt in prompts)
            seen += [([s.index for s in part], generation.stats.prefilled_prompts)] if part else []
        generation.close()
    assert seen == [([0, 1, 2], 6), ([3, 4, 5], 6)]


def test_results_are_looked_at_every_eight_steps_while_the_next_eight_run():
    """A response that ends early costs the steps until somebody looks: its burst, and the one that runs meanwhile."""
    model = small()
    (drawn,) = NativeEngine(model, decoding="slots").generate([make_request((3, 4), 64)])
    ends = [int(drawn.token_ids[place]) for place in (1, 12)]
    assert drawn.token_ids.tolist().index(ends[0]) == 1 and drawn.token_ids.tolist().index(ends[1]) == 12
    for end, steps in zip(ends, (16, 24), strict=True):
        slots, pages, engine = both(model, [make_request((3, 4), 64, eos_ids=(end,))])
        assert_same_tokens(slots, pages)
        assert engine.stats.decode_steps == steps


def test_three_gibibytes_of_a_gpu_are_left_to_activations(monkeypatch):
    gpu, page = torch.device("cuda"), 1 << 20
    for unused, pages in ((3 << 30, 0), (1 << 30, 0), ((3 << 30) + 10 * page, 5), (7 << 30, 2048)):
        monkeypatch.setattr(paged_generation, "unused_bytes", lambda device, unused=unused: unused)
        assert paged_generation.affordable(10_000, page, gpu, share=0.5) == pages
    assert paged_generation.affordable(100, page, gpu, share=0.5) == 100
    assert paged_generation.affordable(10_000, page, torch.device("cpu"), share=0.5) == 10_000


def test_top_k_and_top_p_rows_beside_plain_ones():
    model = small()
    requests = [
        make_request((3, 4), 10, seed=1, top_k=3),
        make_request((3, 4), 10, seed=2),
        make_request((3, 5), 10, seed=3, top_p=0.5),
    ]
    assert_same_tokens(*both(model, requests)[:2])


def test_long_prompts_are_prefilled_in_pieces_before_the_first_step():
    model = small("mistral", sliding_window=40)
    long = [3 + (7 * i) % 30 for i in range(150)]
    requests = [
        make_request((3, 4, 5), 20, seed=1),
        make_request(long, 6, seed=2),
        make_request(long, 6, seed=3),
        make_request(long[:70], 6, seed=4),
    ]
    slots, pages, engine = both(model, requests, prefill_tokens=32)
    assert_same_tokens(slots, pages)
    assert engine.stats.prefill_tokens == 3 + 150 + 70
    assert engine.stats.decode_steps == 19  # those of the longest response: no row began later than another
    assert_same_tokens(*both(small(), requests, prefill_tokens=64)[:2])


def test_pieces_run_on_the_variable_length_kernel_with_the_models_window(monkeypatch):
    windows = []

    def kernel(*args, window_size, **named):
        windows.append(window_size)
        return plain_kernels.varlen_attn(*args, window_size=window_size, **named)

    model = small("mistral", sliding_window=40)
    long = [3 + (7 * i) % 30 for i in range(150)]
    requests = [make_request(long, 6, seed=1), make_request(long[:70], 6, seed=2), make_request(long[:20], 6, seed=3)]
    slots = NativeEngine(model, decoding="slots").generate(requests)
    monkeypatch.setattr("luffy.models.attention.varlen_attn", kernel)
    for module in ("luffy.models.attention", "luffy.rollout.native.paged_cache"):
        monkeypatch.setattr(f"{module}.varlen_serves", lambda query: True)
    monkeypatch.setattr("luffy.models.attention.flash_kernel", lambda heads, trusted: None)
    assert_same_tokens(slots, NativeEngine(model, decoding="pages", prefill_tokens=32).generate(requests))
    assert set(windows) == {(-1, 0), (39, 0)}  # where every sequence is shorter than the window, there is none


def test_a_layer_reads_the_pages_of_all_sequences_at_once(monkeypatch):
    gathered, gather = [], PagedCache.gather
    monkeypatch.setattr(PagedCache, "gather", lambda *args: gathered.append(args[1]) or gather(*args))
    long = [3 + (7 * i) % 30 for i in range(150)]
    requests = [make_request(long[:length], 4, seed=length) for length in (150, 70, 20)]
    # 100 tokens; then 50 that go on and 50 of the second prompt; then 20 that go on and the third prompt.
    slots, pages, _ = both(small(), requests, prefill_tokens=100)
    assert_same_tokens(slots, pages)
    assert gathered == [0, 1, 0, 1]


def test_preempted_sequences_go_on_as_they_would_have(monkeypatch):
    model = small()
    requests = [make_request((3, 4, 5), 80, seed=i) for i in range(3)] + [make_request([6] * 60, 30, seed=9)]
    # Two pages each at the end, and one for scratch: five cannot hold all four at once.
    monkeypatch.setattr(paged_generation, "pages_available", lambda *_: 5)
    slots, pages, engine = both(model, requests)
    assert_same_tokens(slots, pages)
    assert engine.stats.preemptions > 0


def test_a_prompt_waits_for_the_pages_that_running_rows_need_soon(monkeypatch):
    """When the second request ends, two pages are free. The third would take both; the first needs one of them a few
    tokens later, so the third would be preempted."""
    first, second, third = (
        make_request((3, 4, 5), 80, seed=1),
        make_request((6, 7, 8), PAGE - 10, seed=2),
        make_request([9] * (PAGE + 5), 30),
    )
    monkeypatch.setattr(paged_generation, "pages_available", lambda *_: 4)
    slots, pages, engine = both(small(), [first, second, third], max_slots=2)
    assert_same_tokens(slots, pages)
    assert (engine.stats.preemptions, engine.stats.prefill_tokens) == (0, 3 + 3 + PAGE + 5)


@functools.cache
def drawn_by_slots():
    """A model, eight requests of two prompts (five pages each, six at the end), and what the slot engine draws."""
    model = small()
    prompts = [[3 + (5 * i + 11 * p) % 30 for i in range(300)] for p in range(2)]
    requests = [make_request(prompt, 24, seed=i) for prompt in prompts for i in range(4)]
    return model, requests, NativeEngine(model, decoding="slots").generate(requests)


@pytest.mark.parametrize("pages", [7, 8, 11, 12, 13, 16, 22])
def test_any_memory_that_holds_one_sequence_is_enough(monkeypatch, pages):
    model, requests, slots = drawn_by_slots()
    monkeypatch.setattr(paged_generation, "pages_available", lambda *_: pages)
    engine = NativeEngine(model, decoding="pages")
    assert_same_tokens(slots, engine.generate(requests))
    assert engine._paged.cache._block is None


def test_a_prompt_that_fills_all_pages_is_not_evicted_for_the_next_one(monkeypatch):
    monkeypatch.setattr(paged_generation, "pages_available", lambda *_: 2)
    requests = [make_request([first] * (PAGE - 3), 3, seed=i) for first in (3, 4) for i in range(2)]
    slots, pages, engine = both(small(), requests)
    assert_same_tokens(slots, pages)
    assert engine.stats.prefill_tokens == 4 * (PAGE - 3)  # no page for a second sample beside the first


def test_where_pages_are_short_few_rows_start_at_a_time(monkeypatch):
    monkeypatch.setattr(paged_generation, "pages_available", lambda *_: 40)
    requests = [make_request([3 + i % 30] * 60, 150, seed=i) for i in range(24)]
    engine = NativeEngine(small(), decoding="pages", prefill_tokens=128)
    engine.generate(requests)
    assert 0 < engine.stats.preemptions < 10


def test_responses_of_one_token_are_handed_out_round_by_round():
    seen = []
    engine = NativeEngine(small(), decoding="pages", prefill_tokens=4)
    engine.generate(
        [make_request((3, 4 + i), 1, seed=i) for i in range(6)], progress=lambda done, total: seen.append(done)
    )
    assert seen == [2, 4, 6]


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(paged_generation, "pages_available", lambda *_: 2)
    with pytest.raises(UserError, match="memory left for the cache"):
        NativeEngine(small(), decoding="pages").generate([make_request([3] * (PAGE + 1), 4)])
    with pytest.raises(UserError, match="fills the memory"):
        NativeEngine(small(), decoding="pages").generate([make_request([3] * 10, 2 * PAGE)])
    monkeypatch.setattr(paged_generation, "pages_available", lambda *_: 1)
    with pytest.raises(UserError, match="no memory is left"):
        NativeEngine(small(), decoding="pages").generate([make_request([3] * 10, 2)])


def test_new_weights_show_in_the_next_call_and_the_cache_is_given_back():
    model = small()
    engine = NativeEngine(model, decoding="pages")
    engine.generate([make_request((3, 4), 5)])
    decoder = engine._paged._decoder
    assert engine._paged.cache._block is None
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    changed = engine.generate([make_request((3, 4), 5)])[0]
    assert engine._paged._decoder is decoder  # graphs live on: the weights changed in their place
    assert (
        changed.token_ids.tolist()
        == NativeEngine(model, decoding="slots").generate([make_request((3, 4), 5)])[0].token_ids.tolist()
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    engine.generate([make_request((3, 4), 5)])
    assert engine._paged._decoder is not decoder  # weights elsewhere: new graphs


def test_nan_weights_are_named():
    model = small()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="request 0"):
        NativeEngine(model, decoding="pages").generate([make_request((3, 4), 5)])


def test_hooked_layers_and_other_activations_keep_their_modules():
    model = small()
    assert fused_decoder(model) is not None
    handle = model.model.layers[0].register_forward_pre_hook(lambda module, inputs: None)
    assert fused_decoder(model) is None
    handle.remove()
    assert fused_decoder(model) is not None
    assert fused_decoder(small(hidden_act="gelu")) is None
    assert fused_decoder(copy.deepcopy(model)) is not None


def test_a_model_without_a_fused_form_decodes_from_slots_and_says_so_once(monkeypatch):
    native_engine._warn_slow.cache_clear()
    models = [small(hidden_act="gelu"), small(hidden_act="gelu"), small("qwen2", hidden_act="gelu"), small()]
    for model in models:  # a GPU in name
        monkeypatch.setattr(
            model, "parameters", lambda: iter([SimpleNamespace(is_cuda=True, device=torch.device("cuda"))])
        )
    engines = [NativeEngine(model) for model in models]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [native_engine.uses_pages([engine.model], engine.decoding, False) for engine in engines * 2] == [
            False,
            False,
            False,
            True,
        ] * 2
    names = [str(warning.message).split(" has no fused form")[0] for warning in caught]
    assert names == ["LlamaForCausalLM", "Qwen2ForCausalLM"]


def test_a_page_is_free_when_its_last_holder_gives_it_back():
    pool = PagePool(6)
    assert pool.free == 5  # one is scratch
    pages = pool.allocate(3)
    assert 0 not in pages
    shared = pool.share(pages[:2])
    pool.release(pages)
    assert pool.free == 3
    pool.release(shared)
    assert pool.free == 5


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU every test here runs the kernels themselves")
def test_the_kernels_themselves_draw_the_same(monkeypatch, request):
    model = small("qwen3")
    slots = NativeEngine(model, decoding="slots").generate(
        [make_request((3, 4), 4, seed=1), make_request((3, 4, 5), 3, temperature=0.0)]
    )
    monkeypatch.undo()
    request.getfixturevalue("interpreted_kernels")
    engine = NativeEngine(model, decoding="pages", max_slots=2, max_context=64)
    assert_same_tokens(
        slots, engine.generate([make_request((3, 4), 4, seed=1), make_request((3, 4, 5), 3, temperature=0.0)])
    )
