"""Token overrides on a GPU: float32 draws what the CPU draws, bfloat16 reports what it drew with.

LUFFY_GPU_TEST_DEVICE=cpu runs the same checks without one: pytest -m gpu tests/gpu/test_cuda_overrides.py
"""

import os
import warnings

import pytest
import torch
from builders import make_model, make_request

from luffy.core.override_rules import Rule
from luffy.models.load import drop_padding_tokens
from luffy.rollout import SpeculativeEngine
from luffy.run_folder.recorder import read_json_lines
from luffy.train.loop import Trainer

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("LUFFY_GPU_TEST_DEVICE", "cuda")
RULES = {
    "speculative": Rule("speculative"),
    "threshold": Rule("threshold", tau=0.005),
    "mixture": Rule("mixture", eps=0.3),
}
REQUESTS = [
    make_request(
        range(5, 9 + 4 * s), 12 + 6 * s, seed=s, temperature=0.8 + 0.1 * s, eos_ids=(2, 50), prefix=(7,) * (s % 2)
    )
    for s in range(6)
]


def models(device: str, dtype: torch.dtype, tokens: int = 200):
    """Two models near enough for long agreement and far enough for overrides; the second model may know fewer tokens."""
    pair = make_model("llama", 1, initializer_range=0.05), make_model("qwen3", 2, initializer_range=0.05)
    drop_padding_tokens(pair[1], tokens)
    for model in pair:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.to(torch.device(device))
    return pair


def generate_on(device, dtype, rule, *, k=4, budget=None, tokens=200):
    draft, second = models(device, dtype, tokens)
    engine = SpeculativeEngine(draft, second, rule, k=k, max_overrides=budget, max_slots=4)
    return engine.generate(REQUESTS), engine.stats


@pytest.mark.parametrize(("budget", "tokens"), [(None, 200), (3, 200), (None, 150)])
@pytest.mark.parametrize("name", RULES)
def test_float32_draws_what_the_cpu_draws(name, budget, tokens):
    expected, _ = generate_on("cpu", torch.float32, RULES[name], budget=budget, tokens=tokens)
    for k in (1, 4):
        got, stats = generate_on(DEVICE, torch.float32, RULES[name], k=k, budget=budget, tokens=tokens)
        for a, b in zip(expected, got, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist() and a.finish == b.finish
            assert torch.equal(a.overrides, b.overrides)
            for stream in ("log_probs", "behavior_log_probs", "guidance_log_probs"):
                torch.testing.assert_close(getattr(a, stream), getattr(b, stream), atol=2e-4, rtol=1e-3)
        assert 0 < stats.overrides < stats.generated_tokens


needs_graphs = pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU captures")
# Ends at different times, shared prompts, and two pages (of 64 tokens) filled on the way.
MANY = [
    make_request(range(5, 8 + 13 * (s % 6)), 5 + 17 * (s % 9), seed=s, temperature=0.8 + 0.02 * s, eos_ids=(2, 50))
    for s in range(40)
]


def assert_same_overrides(ours, theirs, tolerance, jump=0.0, turned=0):
    """``jump`` is for behaviours under threshold: rounding may carry a token of the vocabulary across tau. ``turned``
    responses may differ: float32 sums in another order may turn one draw in thousands."""
    same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.token_ids.tolist() == b.token_ids.tolist()]
    assert len(same) >= len(ours) - turned
    for a, b in same:
        assert a.finish == b.finish
        assert torch.equal(a.overrides, b.overrides)
        for stream in ("log_probs", "behavior_log_probs", "guidance_log_probs"):
            most = max(tolerance, jump) if stream == "behavior_log_probs" else tolerance
            torch.testing.assert_close(getattr(a, stream), getattr(b, stream), atol=most, rtol=tolerance)


def graphed(pair, rule, **knobs):
    """What an engine makes of `MANY` with its graphs alone; a capture that fails is an error here."""
    engine = SpeculativeEngine(*pair, rule, max_slots=24, **knobs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        completions = engine.generate(MANY)
    assert engine._graphs is not None and len(engine._graphs._graphs) >= 4, "no graphs ran"
    return completions, engine


@needs_graphs
@pytest.mark.parametrize(("k", "budget", "tokens"), [(1, None, 200), (4, None, 200), (4, 3, 200), (3, None, 150)])
@pytest.mark.parametrize("name", RULES)
def test_graphs_draw_what_runs_without_them_draw(monkeypatch, name, k, budget, tokens):
    pair, knobs = models(DEVICE, torch.float32, tokens), {"k": k, "max_overrides": budget}
    graphs, engine = graphed(pair, RULES[name], **knobs)
    assert_same_overrides(engine.generate(MANY), graphs, 1e-5)  # now every size of batch is replayed
    slots = SpeculativeEngine(*pair, RULES[name], max_slots=24, decoding="slots", **knobs)
    assert_same_overrides(graphs, slots.generate(MANY), 2e-4, jump=0.05 if name == "threshold" else 0.0, turned=1)
    assert len({len(c.token_ids) for c in graphs}) > 5 and {c.finish for c in graphs} == {"stop", "length"}
    monkeypatch.setattr(type(engine._graphs), "_capture", lambda self, rows: None)
    eager = SpeculativeEngine(*pair, RULES[name], max_slots=24, **knobs)
    assert_same_overrides(graphs, eager.generate(MANY), 1e-5)
    assert not eager._graphs._graphs


@needs_graphs
def test_graphs_outlive_sleep_new_rules_and_new_weights():
    pair = models(DEVICE, torch.float32)
    first, engine = graphed(pair, RULES["mixture"])
    kept = engine._graphs
    assert all(int(cache._cache.address) == 0 for cache in kept.caches)  # given back
    hole = torch.empty(64 << 20, device=DEVICE)  # the next caches will lie elsewhere
    engine.sleep()
    engine.sync(1)
    assert_same_overrides(engine.generate(MANY), first, 1e-5)
    engine.rule = Rule("mixture", eps=0.0)
    assert not any(c.overrides.any() for c in engine.generate(MANY))
    engine.rule = RULES["speculative"]
    with torch.no_grad():
        pair[0].model.norm.weight.mul_(0.7)
    changed = SpeculativeEngine(*pair, engine.rule, max_slots=24, decoding="slots").generate(MANY)
    assert_same_overrides(engine.generate(MANY), changed, 2e-4, turned=1)
    assert engine._graphs is kept
    longer = [make_request(range(5, 90), 300, seed=s) for s in range(3)]  # more pages a slot, fewer slots
    expected = SpeculativeEngine(*pair, engine.rule, decoding="slots").generate(longer)
    assert_same_overrides(engine.generate(longer), expected, 2e-4, turned=1)
    assert engine._graphs is kept
    del hole


def teacher_forced(model, request, completion) -> torch.Tensor:
    """[T, V] by `transformers` alone, on the same device in the same dtype."""
    model.set_attn_implementation("eager")
    given = [*request.prompt_ids, *request.prefix_ids]
    ids = torch.tensor([[*given, *completion.token_ids.tolist()[:-1]]], device=DEVICE)
    with torch.no_grad():
        logits = model(ids).logits[0, len(given) - 1 :].float()
    return torch.log_softmax(logits / request.sampling.temperature, -1).cpu()


@pytest.mark.parametrize(("dtype", "mean", "largest"), [("float32", 1e-5, 2e-4), ("bfloat16", 0.01, 0.08)])
@pytest.mark.parametrize("name", RULES)
def test_reported_log_probs_are_those_of_a_teacher_forced_pass(name, dtype, mean, largest):
    dtype, rule = getattr(torch, dtype), RULES[name]
    draft, second = models(DEVICE, dtype)
    completions, _ = generate_on(DEVICE, dtype, rule)
    gaps = []
    for request, completion in zip(REQUESTS, completions, strict=True):
        log_d, log_g = (teacher_forced(model, request, completion) for model in (draft, second))
        chosen = completion.token_ids[:, None]
        gaps += [completion.log_probs - log_d.gather(-1, chosen)[:, 0]]
        gaps += [completion.guidance_log_probs - log_g.gather(-1, chosen)[:, 0]]
        # Rounding may carry a token across tau, and its behaviour jumps: threshold is compared in float32 alone.
        if name != "threshold" or dtype == torch.float32:
            gaps += [completion.behavior_log_probs - rule.behavior_log_probs(log_d, log_g, completion.token_ids)]
    gap = torch.cat(gaps).abs()
    assert len(gap) > 300 and float(gap.mean()) < mean and float(gap.max()) < largest


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_trains(make_config, tiny_model, dtype, level):
    guide = {"model_path": str(tiny_model), "rule": "mixture", "eps": 0.5, "temperature": 2.0}
    cfg = make_config(
        model={"device": DEVICE, "dtype": dtype},
        rollout={"offpolicy_guidance": guide},
        algorithm={"reject_extreme": False, "importance_level": level},
        batch={"mini_batch": 3},
    )
    with Trainer(cfg) as trainer:
        trainer.train()
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    for r in rows:
        assert r["rollout/logprob_diff_mean"] < (1e-4 if dtype == "float32" else 0.05)
        assert 0 < r["guidance/token_ratio"] < 1 and 0 < r["guidance/ess"] < 1 and r["guidance/weight_max"] > 1
