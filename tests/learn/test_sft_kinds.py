"""PSFT, EAFT, iw-SFT and ASFT: the gradient that an update gives the weights of a tiny model is that of the formula,
computed from the model's own logits in float64."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from builders import make_model, make_task
from ranks import run_ranks
from trainings import train, untimed_metrics

from luffy.config import check_made_for, load_config, read_recipe
from luffy.errors import ConfigError
from luffy.learn.policy import Policy
from luffy.learn.scorer import TokenScorer
from luffy.step.draws import trace_sample
from luffy.types import Demonstration

TRACES = [((5, 6, 7), (8, 9, 3, 4, 1)), ((5, 9), (3, 3, 10)), ((4, 4, 4, 8), (11, 2, 7, 9))]


def shifted(model, size):
    """A copy with other weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator))
    return other


def of_traces(model):
    """Of a model in float64, for each trace: log-probs of every next token, [T, V], and of its own tokens, [T]."""
    found = []
    for prompt, trace in TRACES:
        logits = model(torch.tensor([prompt + trace])).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(logits, -1)
        found.append((log_p, log_p.gather(-1, torch.tensor(trace)[:, None])[:, 0]))
    return found


def gradients(recipe, published, overrides=(), old=None, budget=64):
    """Of every parameter: by an update's backward passes, and by ``published(now, reference, old)`` of distributions."""
    overrides = [f"batch.tokens={budget}", "data.max_prompt_tokens=8", "rollout.max_tokens=8", *overrides]
    cfg = load_config(f"tiny/{recipe}", overrides)
    model = make_model("llama", vocab_size=32)
    reference, old = shifted(model, 0.02), shifted(model, 0.03)
    samples = [trace_sample(make_task(prompt), Demonstration(tuple(trace))) for prompt, trace in TRACES]
    policy = Policy(model, cfg, temperature=1.0)
    policy.anchor = policy.scorer_of(reference)
    refs, olds = (policy.log_probs(samples, TokenScorer(m)) for m in (reference, old))
    if cfg.algorithm.sft_weight.part.needs_reference:
        samples = [replace(s, ref_log_probs=ref) for s, ref in zip(samples, refs, strict=True)]
    if cfg.algorithm.sft_reshape.part.compared:
        samples = [replace(s, old_log_probs=of) for s, of in zip(samples, olds, strict=True)]
    seen = {}
    policy.optimizer.step = lambda lr, norm: seen.update(
        {name: p.grad.double().clone() for name, p in policy.optimizer.masters.items()}
    )
    exact, ref64, old64 = (copy.deepcopy(m).double() for m in (model, reference, old))
    for whole in (exact, ref64, old64):
        whole.set_attn_implementation("eager")
    policy.update(samples, 1e-3)
    with torch.no_grad():
        fixed = of_traces(ref64), of_traces(old64)
    published(of_traces(exact), *fixed).backward()
    return seen, {name: p.grad for name, p in exact.named_parameters()}


TOKENS = sum(len(trace) for _, trace in TRACES)


def psft(now, reference, old):
    ratios = [torch.exp(p - o) for (_, p), (_, o) in zip(now, old, strict=True)]
    assert any((r > 1.02).any() for r in ratios) and any((r < 0.98).any() for r in ratios)
    return -sum(torch.minimum(r, r.clamp(1 - 0.02, 1 + 0.02)).sum() for r in ratios) / TOKENS


def eaft(now, reference, old):
    total = 0
    for log_p, p in now:
        best = log_p.detach().exp().topk(20, -1).values
        best = best / best.sum(-1, keepdim=True)
        total = total - (-(best * best.log()).sum(-1) / math.log(20) * p).sum()
    return total / TOKENS


def iw_sft(now, reference, old):
    weights = [
        torch.exp(p.detach().mean() - r.mean()).clamp(max=1) for (_, p), (_, r) in zip(now, reference, strict=True)
    ]
    assert {float(w) == 1 for w in weights} == {True, False}
    return -sum(w * p.sum() for w, (_, p) in zip(weights, now, strict=True)) / TOKENS


def asft(now, reference, old):
    total = 0
    for (log_p, p), (log_q, _) in zip(now, reference, strict=True):
        total = total - (p.detach().exp() * p).sum() + 0.1 * (log_q.exp() * (log_q - log_p)).sum()
    return total / TOKENS


METHODS = {
    "psft": (psft, ["algorithm.sft_reshape.clip=0.02"]),
    "eaft": (eaft, []),
    "iw_sft": (iw_sft, ["algorithm.sft_weight.cap=1"]),
    "asft": (asft, []),
}


@pytest.mark.parametrize("budget", [64, 16])
@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_the_formula(method, budget):
    published, overrides = METHODS[method]
    ours, expected = gradients(method, published, overrides, budget=budget)
    assert ours.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(ours[name], wanted, rtol=1e-4, atol=1e-6)


def test_the_first_mini_batch_of_psft_is_sft():
    """Then the policy before the batch is the policy."""
    cfg = load_config("tiny/psft")
    policy = Policy(make_model("llama", vocab_size=32), cfg, temperature=1.0)
    samples = [trace_sample(make_task(prompt), Demonstration(tuple(trace))) for prompt, trace in TRACES]
    metrics = policy.update(samples, 1e-3)
    assert metrics["method/sft_weight_mean"].value == pytest.approx(1.0)


def test_rl_without_an_sft_term_refuses_its_weights():
    for setting, said in (("sft_weight=eaft", "sft_weight' .eaft"), ("sft_anchor=0.1", "sft_anchor' .0.1")):
        cfg = load_config("tiny/on_policy", [f"algorithm.{setting}"])
        with pytest.raises(ConfigError, match=f"{said}. is for the SFT term, in which 'algorithm.credit'"):
            check_made_for(cfg, "rl")
    check_made_for(load_config("tiny/rl_sft_loss", ["algorithm.sft_weight=eaft"]), "rl")


def sft_of(make_config, method, name):
    recipe = {key: part for key, part in read_recipe(f"methods/{method}").items() if key != "name"}
    batch = {"problems": 6, "mini_batch": 3, "tokens": 96}
    return make_config(**{**recipe, "name": f"{name}-{method}", "batch": batch, "train": {"steps": 3, "save_every": 3}})


def train_all_kinds(configs, world):
    for cfg in configs:
        train(cfg, world, method="sft")


@pytest.mark.slow
def test_ranks_and_micro_batches_change_nothing(make_config):
    alone, many = ([sft_of(make_config, method, name) for method in METHODS] for name in ("alone", "many"))
    train_all_kinds(alone, None)
    run_ranks(2, train_all_kinds, many)
    for one, two in zip(alone, many, strict=True):
        for a, b in zip(untimed_metrics(one), untimed_metrics(two), strict=True):
            for name in ("actor/loss", "actor/grad_norm", "method/sft_token_weight", "method/sft_anchor_kl"):
                assert b.get(name, 0) == pytest.approx(a.get(name, 0), rel=1e-3, abs=1e-6), (one.name, name)
