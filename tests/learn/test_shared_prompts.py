"""A group's prompt computed once gives the numbers of one computed for every sample."""

import dataclasses

import pytest
import torch
from builders import ARCHITECTURES, make_model, make_samples

from luffy.learn.packing import pack
from luffy.learn.policy import Policy
from luffy.learn.scorer import TokenScorer
from luffy.models import plain
from luffy.models.load import load_model

LONG, SHORT = tuple(range(20, 31)), (7, 8)


def grouped_samples():
    """Groups of 4, 2 and 1 samples, their order mixed; responses of 4 to 10 tokens."""
    samples = make_samples()
    prompts = [LONG, SHORT, LONG, (5, 6, 4), LONG, SHORT, LONG]
    return [dataclasses.replace(s, prompt_ids=p) for s, p in zip(samples, prompts, strict=True)]


def in_order(batches, streams):
    """Per sample, as they were given."""
    pieces = [piece for stream, b in zip(streams, batches, strict=True) for piece in stream.split(b.response_lengths)]
    order = [i for b in batches for i in b.order]
    return torch.cat([piece for _, piece in sorted(zip(order, pieces, strict=True), key=lambda pair: pair[0])])


def scored_samples(model, share, budget=10_000):
    """Log-probs, entropies and the gradients of a loss that treats every one of them differently."""
    samples = grouped_samples()
    model.zero_grad()
    batches = pack(samples, budget, "token-mean", 16, share=share)
    results = [TokenScorer(model)(b, 0.9)[:2] for b in batches]
    log_probs, entropies = (in_order(batches, part) for part in zip(*results, strict=True))
    weights = torch.linspace(-1, 2, len(log_probs))
    (log_probs * weights + entropies * weights.flip(0)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return log_probs.detach(), entropies.detach(), gradients


def assert_alike(ours, theirs, tolerance=2e-6):
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    assert ours[2] and ours[2].keys() == theirs[2].keys()
    for name, gradient in theirs[2].items():
        error = (ours[2][name] - gradient).norm() / gradient.norm()
        assert error < tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_and_gradients_are_those_of_whole_samples(architecture, checkpointing):
    """Mistral's window of 8 is shorter than the longer prompt."""
    model = make_model(architecture, initializer_range=0.08).train()
    theirs = scored_samples(model, share=False)
    if checkpointing:
        model.gradient_checkpointing_enable()
    assert_alike(scored_samples(model, share=True), theirs)
    assert_alike(scored_samples(model, share=True, budget=25), theirs)  # the large group in parts


def test_adapters_too():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(make_model("qwen2", initializer_range=0.08), settings).train()
    assert_alike(scored_samples(model, share=True), scored_samples(model, share=False))


def test_the_update_counts_what_it_computes_and_does_not_depend_on_sharing(make_config, monkeypatch):
    def run(tokens):
        cfg = make_config(optim={"eps": 1.0, "grad_clip": 0}, batch={"tokens": tokens})
        policy = Policy(load_model(cfg.model.path, cfg.model.dtype, "cpu"), cfg)
        metrics = policy.update(samples, 0.01)
        return policy, metrics, [metrics[f"perf/{name}_tokens"].value for name in ("update", "computed")]

    samples = [dataclasses.replace(s, prompt_ids=tuple(t % 15 + 3 for t in s.prompt_ids)) for s in grouped_samples()]
    trained, responses = sum(map(len, samples)), sum(s.token_ids.numel() for s in samples)
    policy, metrics, tokens = run(1000)
    assert tokens == [trained, len(LONG) + len(SHORT) + 3 + responses]
    log_probs, views = policy.log_probs(samples), policy.token_views(samples)
    _, parted, _ = run(32)
    monkeypatch.setattr(TokenScorer, "shares_prompts", False)
    other, whole, tokens = run(1000)
    assert tokens == [trained, trained]
    torch.testing.assert_close(other.log_probs(samples), log_probs, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(views, other.token_views(samples), strict=True):
        torch.testing.assert_close(mine.gradient_weights, theirs.gradient_weights, atol=1e-5, rtol=1e-5)
    for name in ("actor/loss", "actor/pg_loss", "actor/grad_norm", "actor/entropy_loss"):
        for result in (parted, whole):
            assert result[name].value == pytest.approx(metrics[name].value, rel=1e-5, abs=1e-7)


def test_a_model_that_runs_by_its_own_forward_pass_gets_whole_samples(make_config, monkeypatch):
    cfg = make_config()
    samples = [dataclasses.replace(s, prompt_ids=(3, 4, 5)) for s in make_samples()]
    model = load_model(cfg.model.path, "float32", "cpu")
    policy = Policy(model, cfg)
    ours = policy.log_probs(samples)
    model.set_attn_implementation("eager")
    monkeypatch.setitem(plain._reasons, model, "for this test")
    assert not policy.scorer.shares_prompts
    torch.testing.assert_close(policy.log_probs(samples), ours, atol=1e-5, rtol=1e-5)
    assert policy.update(samples, 0.0)["perf/computed_tokens"].value == sum(map(len, samples))
