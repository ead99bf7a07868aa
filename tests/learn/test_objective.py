"""The loss of a micro-batch, term by term, against its closed form."""

import math
from dataclasses import replace

import pytest
import torch
from builders import make_samples

from luffy.core.losses import PolicyLoss, kl_penalty
from luffy.core.shaping import Shape, trace_weight
from luffy.learn.objective import Objective
from luffy.learn.packing import pack
from luffy.metrics import fetch

PLAIN = PolicyLoss(clip_low=0.8, clip_high=1.2)


@pytest.fixture
def batch():
    """One micro-batch of seven samples, on-policy and off-policy, with a reference and weights of the token mean."""
    samples = [replace(s, ref_log_probs=-1.5 - 0.1 * torch.arange(len(s.token_ids))) for s in make_samples()]
    (packed,) = pack(samples, 1000, "token-mean", 16)
    return packed


@pytest.fixture
def tokens(batch):
    """Log-probs and entropies of the response tokens as a model might give them."""
    g = torch.Generator().manual_seed(1)
    count = len(batch.targets)
    return -2 - 0.5 * torch.rand(count, generator=g), 1 + torch.rand(count, generator=g)


def loss_of(batch, tokens, **settings):
    loss, _ = Objective(PLAIN, **settings)(batch, *tokens)
    return float(loss)


def test_the_entropy_is_a_bonus(batch, tokens):
    _, entropy = tokens
    without, with_it = (loss_of(batch, tokens, entropy_coef=c) for c in (0.0, 0.3))
    bonus = float((batch.rl_weights * entropy).sum())
    assert bonus > 1 and with_it == pytest.approx(without - 0.3 * bonus, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_is_a_penalty_on_the_distance_to_the_reference(batch, tokens, estimator):
    log_prob, _ = tokens
    without, with_it = (loss_of(batch, tokens, kl_coef=c, kl_estimator=estimator) for c in (0.0, 0.7))
    penalty = float((batch.rl_weights * kl_penalty(log_prob, batch.ref_log_probs, estimator)).sum())
    assert abs(penalty) > 0.05 and with_it == pytest.approx(without + 0.7 * penalty, rel=1e-5)
    _, stats = Objective(PLAIN, kl_coef=0.7, kl_estimator=estimator)(batch, *tokens)
    total, count = stats["actor/kl_loss"].numbers
    assert float(total / count) == pytest.approx(penalty, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_token_of_the_sft_term_alone_may_be_far_from_the_reference(batch, tokens, estimator):
    log_prob, entropy = (t.clone() for t in tokens)
    alone = torch.arange(len(log_prob)) == 2
    log_prob[alone] = -120.0  # k3 of it is infinite
    weights = torch.where(alone, 0.0, batch.rl_weights)
    batch = replace(batch, rl_weights=weights, sft_weights=alone.float())
    log_prob.requires_grad_(True)
    loss, _ = Objective(PLAIN, kl_coef=0.7, kl_estimator=estimator)(batch, log_prob, entropy)
    loss.backward()
    assert loss.isfinite() and log_prob.grad[2] == -1 and log_prob.grad.isfinite().all()


@pytest.mark.parametrize("shape", ["chord_phi", "no_reshape"])
def test_a_shape_in_the_sft_term_weighs_the_gradient(batch, tokens, shape):
    log_prob, entropy = (t.clone().requires_grad_(True) for t in tokens)
    weights = torch.linspace(0, 1, len(log_prob))
    in_sft = replace(batch, rl_weights=torch.zeros_like(weights), sft_weights=weights)
    loss, stats = Objective(PLAIN, sft_coef=0.5, sft_shape=Shape(shape))(in_sft, log_prob, entropy)
    loss.backward()
    w = trace_weight(shape, log_prob)
    torch.testing.assert_close(log_prob.grad, -0.5 * weights * w)
    total, count = stats["method/sft_weight_mean"].numbers
    assert float(total / count) == pytest.approx(float(w[1:].mean()), rel=1e-5)


@pytest.mark.parametrize("shape", ["p_div_p_0.1", "rl_plus", "exgrpo"])
def test_the_weight_of_trace_tokens_is_that_of_the_loss(batch, tokens, shape):
    log_prob, entropy = tokens
    batch = replace(
        batch,
        old_log_probs=log_prob - 0.2,
        advantages=torch.where(batch.off_policy, -0.5, 0.25),
        rl_weights=batch.rl_weights * (torch.arange(len(log_prob)) % 3 > 0),  # some of the trace's tokens do not count
    )
    objective = Objective(replace(PLAIN, off_shape=Shape(shape)))
    _, stats = objective(batch, log_prob.clone().requires_grad_(True), entropy)
    off = batch.off_policy & (batch.rl_weights != 0)
    expected = trace_weight(shape, log_prob, batch.old_log_probs, batch.behavior_log_probs)[off].mean()
    total, count = stats["method/trace_weight_mean"].numbers
    assert int(count) == int(off.sum()) > 3 and float(total / count) == pytest.approx(float(expected), rel=1e-5)
    assert "method/trace_weight_mean" not in objective(batch, *tokens)[1]  # without a gradient there is none


def test_the_sft_term_is_the_negative_log_likelihood(batch, tokens):
    log_prob, _ = tokens
    half = replace(batch, sft_weights=torch.full_like(batch.rl_weights, 0.5))
    expected = loss_of(batch, tokens) - 2.0 * float((0.5 * log_prob).sum())
    assert loss_of(half, tokens, sft_coef=2.0) == pytest.approx(expected, rel=1e-5)


def test_the_mismatch_is_over_own_tokens_whose_engine_log_prob_is_known(batch, tokens):
    log_prob, _ = tokens
    old, engine = log_prob.clone(), log_prob - 0.25
    own = (~batch.off_policy).nonzero().flatten()
    engine[own[0]], engine[own[1]] = float("nan"), log_prob[own[1]] + 1.0
    engine[batch.off_policy] = log_prob[batch.off_policy] + 9.0  # a teacher's tokens were not drawn by the engine
    _, stats = Objective(PLAIN)(replace(batch, old_log_probs=old, engine_log_probs=engine), *tokens)
    metrics = fetch([stats])
    known = len(own) - 1
    assert metrics["rollout/logprob_diff_mean"].value == pytest.approx((0.25 * (known - 1) + 1.0) / known, rel=1e-5)
    assert metrics["rollout/logprob_diff_max"].value == pytest.approx(1.0, rel=1e-5)
    high, low = math.exp(0.25), math.exp(-1.0)
    share = ((known - 1) * high + low) ** 2 / (known * ((known - 1) * high**2 + low**2))
    assert metrics["rollout/ess"].value == pytest.approx(share, rel=1e-5)


def test_what_a_viewer_shows_of_a_token_has_no_part_of_the_kl(batch, tokens):
    log_prob, _ = tokens
    objective = Objective(PLAIN, kl_coef=5.0)
    alone = objective.gradient_weights(replace(batch, ref_log_probs=None), log_prob)
    torch.testing.assert_close(objective.gradient_weights(batch, log_prob), alone)
    assert alone.abs().sum() > 0
