"""Decoding with overrides from graphs draws what it draws without; on a CPU with plain torch in the place of kernels and graphs."""

import threading
import time
import warnings
from contextlib import contextmanager
from functools import partial

import plain_kernels
import pytest
import torch
from builders import DEVICE, GPU_IF_THERE, make_model, make_request
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from luffy.core.override_rules import Rule
from luffy.errors import UserError
from luffy.kernels.paged import PAGE
from luffy.models.load import drop_padding_tokens
from luffy.rollout import SpeculativeEngine
from luffy.rollout.native import paged_cache
from luffy.rollout.native.decode_graphs import capturing
from luffy.rollout.native.slot_cache import ModelRunner
from luffy.rollout.overrides import round_graphs
from luffy.rollout.overrides.round_graphs import RoundGraphs
from luffy.types import Request

pytestmark = GPU_IF_THERE
RULES = [Rule("speculative"), Rule("threshold", tau=0.02), Rule("mixture", eps=0.3)]
SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.1}


@pytest.fixture(autouse=True)
def fast_on_a_cpu(monkeypatch):
    if DEVICE.type == "cpu":
        plain_kernels.install(monkeypatch)


def pair(first="llama", second="qwen3", tokens=40, layers=(2, 3)):
    shapes = [{**SMALL, "num_hidden_layers": count} for count in layers]
    models = make_model(first, 1, **shapes[0]), make_model(second, 2, **shapes[1])
    drop_padding_tokens(models[1], tokens)
    return tuple(model.to(DEVICE) for model in models)


def graph_requests() -> list[Request]:
    """Shared prompts, ends at different times, a page filled in mid-run, a prompt of more than one page."""
    several = [
        make_request(range(3, 9 + s % 2), 3 + 5 * s, seed=s, eos_ids=(5, 11, 20), temperature=0.8 + 0.1 * s)
        for s in range(5)
    ]
    return [
        *several,
        make_request([3 + i % 30 for i in range(PAGE - 6)], 14, seed=7),
        make_request([9] * (PAGE + 9), 1),
        make_request((4,), 9),
    ]


def generate(models, rule, decoding, asked=None, **knobs):
    engine = SpeculativeEngine(*models, rule, decoding=decoding, **{"k": 3, "max_slots": 3, **knobs})
    return engine.generate(asked or graph_requests()), engine


def assert_same_completions(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.finish == b.finish
        assert torch.equal(a.overrides, b.overrides)
        for stream in ("log_probs", "behavior_log_probs", "guidance_log_probs"):
            torch.testing.assert_close(getattr(a, stream), getattr(b, stream), atol=1e-5, rtol=1e-5)


# The rule is no part of a graph: each is tried, not each with every variant.
@pytest.mark.parametrize(
    ("rule", "k", "budget", "tokens"),
    [
        (RULES[0], 1, None, 40),
        (RULES[1], 4, None, 40),
        (RULES[2], 3, 2, 40),
        (RULES[0], 3, None, 33),
        (RULES[2], 3, None, 33),
    ],
)
def test_pages_draw_what_slots_draw(rule, k, budget, tokens):
    models = pair(tokens=tokens)
    knobs = {"k": k, "max_overrides": budget}
    slots, _ = generate(models, rule, "slots", **knobs)
    pages, engine = generate(models, rule, "pages", **knobs)
    assert_same_completions(pages, slots)
    assert {c.finish for c in pages} == {"stop", "length"}
    assert 0 < engine.stats.overrides < engine.stats.generated_tokens
    assert engine.stats.decode_steps == k * engine.stats.second_passes


@pytest.mark.parametrize("architectures", [("qwen2", "mistral"), ("mistral", "llama")])
def test_windows_and_other_architectures(architectures):
    models = pair(*architectures)
    assert_same_completions(*(generate(models, RULES[2], kind, max_slots=8, k=5)[0] for kind in ("pages", "slots")))


def test_the_context_may_be_filled_to_the_last_token(monkeypatch):
    """And no table of positions is read past its end for proposals that nobody will take. What looks on is captured
    with the rest, so it reads nothing back: that would end the capture."""
    models = make_model("llama", 1, max_position_embeddings=PAGE), make_model("qwen2", 2, max_position_embeddings=PAGE)
    models = [model.to(DEVICE) for model in models]
    asked = [make_request(range(3, 23), PAGE - 20), make_request((5,), PAGE - 1, seed=1)]
    last, decode = torch.zeros((), dtype=torch.int64, device=DEVICE), ModelRunner.decode

    def watched(self, tokens, at, *rest):
        torch.maximum(last, at.max(), out=last)
        return decode(self, tokens, at, *rest)

    monkeypatch.setattr(ModelRunner, "decode", watched)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such as: on without CUDA graphs
        assert_same_completions(*(generate(models, RULES[2], kind, asked, k=7)[0] for kind in ("pages", "slots")))
    assert int(last) == PAGE - 1


def test_graphs_stay_and_caches_go():
    models = pair()
    first, engine = generate(models, RULES[2], "pages", max_slots=8)
    kept = engine._graphs
    assert all(cache._cache._block is None for cache in kept.caches)
    engine.rule = Rule("mixture", eps=1.0)
    assert all(c.overrides.all() for c in engine.generate(graph_requests()[:2]))
    engine.rule = RULES[2]
    assert_same_completions(engine.generate(graph_requests()), first)
    with torch.no_grad():
        models[0].lm_head.weight.mul_(-1.0)
    assert_same_completions(engine.generate(graph_requests()), generate(models, RULES[2], "slots")[0])
    assert engine._graphs is kept


@pytest.mark.parametrize("change", ["weights", "k", "rows"])
def test_graphs_that_no_longer_fit_are_made_anew(change):
    models = pair()
    engine = SpeculativeEngine(*models, RULES[2], k=3, decoding="pages")
    engine.generate(graph_requests()[:4])
    before = engine._graphs
    if change == "weights":
        models[1].model.norm.weight.data = models[1].model.norm.weight.data * 2
    engine.k = 2 if change == "k" else 3
    asked = graph_requests() if change == "rows" else graph_requests()[:4]
    got = engine.generate(asked)
    assert engine._graphs is not before
    assert_same_completions(got, generate(models, RULES[2], "slots", asked)[0])


def test_little_memory_gives_few_slots(monkeypatch):
    models = pair()
    expected, _ = generate(models, RULES[0], "slots", max_slots=8)
    sizes = []
    monkeypatch.setattr(round_graphs, "affordable", lambda wanted, each, *_: sizes.append((wanted, each)) or 2)
    got, engine = generate(models, RULES[0], "pages", max_slots=8)
    assert_same_completions(got, expected)
    # Keys and values of 2 + 3 layers on two pages, and ten float32 [k, V].
    heads = {m: paged_cache.cache_shape(m) for m in models}
    pages = sum(2 * s.layers * 2 * s.kv_heads * PAGE * s.width * 4 for s in heads.values())
    assert sizes == [(8, pages + 10 * 3 * 40 * 4)] and engine._graphs.caches[0].slots == 2
    monkeypatch.setattr(round_graphs, "affordable", lambda *_: 0)
    with pytest.raises(UserError, match="no memory is left for one sequence with overrides"):
        engine.generate(graph_requests())


def test_a_smaller_cache_forgets_the_pages_of_a_larger_one():
    """Rows that only fill up a batch would write beyond the block, where others' memory lies."""
    cache = paged_cache.PagedSlots(paged_cache.cache_shape(pair()[0]), DEVICE, rows=4, longest=3 * PAGE)
    cache.allocate(4, 3 * PAGE)
    cache.allocate(2, PAGE + 1)
    assert cache._tables.tolist() == [[1, 2, 0], [3, 4, 0], [0, 0, 0], [0, 0, 0]]
    assert len(cache._cache._block) == 5


def test_idle_rows_do_not_look_where_sequences_of_an_earlier_round_stood(monkeypatch):
    seen, launch = [], RoundGraphs._launch

    def noted(self, rows):
        seen.append(self._input.positions.tolist())
        launch(self, rows)

    monkeypatch.setattr(RoundGraphs, "_launch", noted)
    asked = [make_request((3, 4, 5), 2 + 6 * (s < 2), seed=s) for s in range(4)]
    generate(pair(), Rule("mixture", eps=0.0), "pages", asked, k=2, max_slots=8)
    assert min(seen[0]) == 3  # four sequences begin behind three tokens
    assert len(seen) == 4 and all(min(at[:2]) > 3 and at[2:] == [0, 0] for at in seen[1:])


def test_scores_of_idle_rows_are_paid_for_too(monkeypatch):
    """Five sequences run in graphs of eight rows: where memory is for six, there are six."""
    models, wanted = pair(), []
    monkeypatch.setattr(round_graphs, "affordable", lambda count, *_: wanted.append(count) or 6)
    got, engine = generate(models, RULES[0], "pages", graph_requests()[:5], max_slots=32)
    assert wanted == [8] and len(engine._graphs._output.tokens) == 6 and engine._graphs.caches[0].slots == 5
    assert_same_completions(got, generate(models, RULES[0], "slots", graph_requests()[:5])[0])


def test_a_call_that_finds_no_memory_leaves_none_taken(monkeypatch):
    models = pair()
    expected, engine = generate(models, RULES[0], "pages")
    caches = engine._graphs.caches
    allocate = caches[1].allocate

    def refuse(*_):
        raise torch.OutOfMemoryError("no")

    caches[1].allocate = refuse
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(graph_requests())
    caches[1].allocate = allocate
    taken, affordable = [], round_graphs.affordable
    monkeypatch.setattr(
        round_graphs, "affordable", lambda *a: taken.append([c._cache._block for c in caches]) or affordable(*a)
    )
    assert_same_completions(engine.generate(graph_requests()), expected)
    assert taken == [[None, None]]


def test_pages_are_refused_where_every_bit_counts():
    with pytest.raises(UserError, match="batch_invariant needs decoding in slots"):
        SpeculativeEngine(*pair(), RULES[0], decoding="pages", batch_invariant=True)


class Replayed:
    def __init__(self, compute):
        self.replay = compute


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU the graphs themselves run")
def test_every_size_of_batch_is_captured_once_and_replayed(monkeypatch):
    captured = []

    def capture(self, rows):
        captured.append(rows)
        self._graphs[rows] = Replayed(partial(self._compute, rows))

    monkeypatch.setattr(RoundGraphs, "_capture", capture)
    models = pair()
    expected, _ = generate(models, RULES[1], "slots", max_slots=8)
    engine = SpeculativeEngine(*models, RULES[1], k=3, max_slots=8, decoding="pages")
    engine.round_graphs(8, PAGE)._pool = "pool"
    for _ in range(2):
        assert_same_completions(engine.generate(graph_requests()), expected)
    assert sorted(captured) == sorted(set(captured)) and captured[0] == 8 and len(captured) >= 3


class FakeCuda:
    """As much of torch.cuda as a capture touches; like torch's own, a capture that fails leaves its stream current."""

    def __init__(self, monkeypatch, fails=False):
        self.stream, self.fails, self.captures, self.together = "the caller's", fails, 0, 0
        for name in ("synchronize", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def graph(self, graph, pool, capture_error_mode):
        self.captures += 1
        self.together = max(self.together, self.captures)
        before, self.stream = self.stream, "the capture's"
        yield
        self.captures -= 1
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.stream = before


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU captures")
def test_without_capture_it_says_so_once_and_goes_on_where_it_was(monkeypatch):
    models = pair()
    engine = SpeculativeEngine(*models, RULES[0], k=3, max_slots=8, decoding="pages")
    engine.round_graphs(8, PAGE)._pool = "pool"
    cuda = FakeCuda(monkeypatch, fails=True)
    with pytest.warns(UserWarning, match="without CUDA graphs.*not permitted") as caught:
        got = engine.generate(graph_requests())
    assert len(caught) == 1 and cuda.stream == "the caller's"
    assert_same_completions(got, generate(models, RULES[0], "slots", max_slots=8)[0])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU captures")
def test_threads_capture_one_after_the_other(monkeypatch):
    """An evaluation begins while rollouts made ahead meet a new size of batch."""
    cuda = FakeCuda(monkeypatch)

    def capture():
        with capturing("pool"):
            time.sleep(0.05)

    threads = [threading.Thread(target=capture) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (cuda.together, cuda.captures) == (1, 0)


class OnTheDeviceAlone(TorchDispatchMode):
    """Refuses what a capture would: a tensor of the host, a value read back, a shape that depends on values."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "repeat_interleave.Tensor")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if any(part in name for part in self.REFUSED) or any(t.device.type != "meta" for t in tensors):
            raise AssertionError(f"{name} on {[(t.device.type, t.dtype) for t in tensors]}")
        if name.startswith(("aten.index", "aten._index_put")) and any(t.dtype == torch.bool for t in tensors[1:]):
            raise AssertionError(f"{name} with a mask")
        return out


def shapes_alone(monkeypatch):
    """Kernels that compute nothing, for tensors without values."""
    monkeypatch.setattr(paged_cache, "store", lambda *_: None)
    monkeypatch.setattr(paged_cache, "attend", lambda q, *_: torch.empty_like(q))
    monkeypatch.setattr(round_graphs, "draw_tokens", lambda log_probs, *_: log_probs.argmax(-1))


@pytest.mark.parametrize("tokens", [40, 33])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_round_never_leaves_the_device(monkeypatch, architecture, tokens):
    plain_kernels.install(monkeypatch)
    shapes_alone(monkeypatch)
    models = [model.to("meta") for model in pair("llama", architecture, tokens)]
    graphs = RoundGraphs(*models, rows=8, k=3, max_context=PAGE)
    with torch.no_grad(), OnTheDeviceAlone():
        graphs._compute(4)
    with pytest.raises(AssertionError, match="cpu"), OnTheDeviceAlone():
        graphs._input.positions + torch.tensor([1] * 8)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU every test here runs the kernels themselves")
def test_the_kernels_themselves_draw_the_same(monkeypatch, request):
    models = pair(layers=(1, 2))
    asked = [make_request((3, 4), 4, seed=1), make_request((3, 4, 5), 3, seed=2)]
    expected, _ = generate(models, RULES[0], "slots", asked)
    monkeypatch.undo()
    request.getfixturevalue("interpreted_kernels")
    got, _ = generate(models, RULES[0], "pages", asked, k=2, max_context=PAGE, max_slots=2)
    assert_same_completions(got, expected)
