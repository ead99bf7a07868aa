"""The weight of trace tokens: closed forms, and the gradient of each published objective."""

import sys

import pytest
import torch

from luffy.config import AlgorithmConfig
from luffy.core.losses import PolicyLoss, policy_loss_terms
from luffy.core.shaping import Shape, compared_shape, shape_of_method, trace_weight
from luffy.errors import UserError

D = torch.float64
P = torch.tensor([0.001, 0.05, 0.1, 0.3, 0.7, 0.999], dtype=D)
OLD = torch.tensor([0.01, 0.02, 0.3, 0.3, 0.5, 0.9], dtype=D)
Q = torch.tensor([0.5, 0.05, 0.2, 0.9, 0.35, 1.0], dtype=D)
R = P / Q

WEIGHTS = {
    "luffy": 0.1 * P / (P + 0.1) ** 2,
    "mixed": P,
    "sft": torch.ones_like(P),
    "chord_phi": P * (1 - P),
    "trapo": (P / 0.1).clamp(max=1),
    "rl_plus": 2 * P / (1.5 * OLD + 0.5) * (1 - P) ** 0.5,
    "exgrpo": 0.1 * R / (R + 0.1) ** 2,
    "square_root": 0.5 * P.sqrt(),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_closed_forms(name):
    torch.testing.assert_close(trace_weight(name, P.log(), OLD.log(), Q.log()), WEIGHTS[name])


def test_knobs_and_what_is_taken_where_nothing_is_given():
    log_p = P.log()
    torch.testing.assert_close(trace_weight("luffy", log_p, gamma=0.5), 0.5 * P / (P + 0.5) ** 2)
    torch.testing.assert_close(trace_weight("trapo", log_p, gamma=0.5), (P / 0.5).clamp(max=1))
    torch.testing.assert_close(trace_weight("exgrpo", log_p, gamma=0.5), trace_weight("luffy", log_p, gamma=0.5))
    now = 2 * P / (1.5 * P + 0.5)
    torch.testing.assert_close(trace_weight("rl_plus", log_p), now * (1 - P) ** 0.5)
    torch.testing.assert_close(trace_weight("rl_plus", log_p, pow_exp=0.0), now)


PUBLISHED = {  # as the papers and their code write the objective on a trace token, to be maximised
    "luffy": lambda p, old, q: p / (p + 0.1),
    "mixed": lambda p, old, q: p,
    "sft": lambda p, old, q: p.log(),
    "chord_phi": lambda p, old, q: (p * (1 - p)).detach() * p.log(),
    "trapo": lambda p, old, q: (p / 0.1).clamp(max=1).detach() * p.log(),
    "rl_plus": lambda p, old, q: 2 * p / (old + 0.5 * (old + 1)) * (1 - p.detach()) ** 0.5,
    "exgrpo": lambda p, old, q: (p / q) / (p / q + 0.1),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("advantage", [0.875, -0.5])
def test_the_loss_has_the_gradient_of_the_published_objective(name, advantage):
    """Over a whole distribution: every logit of three states with four tokens each, one of which the trace has."""
    logits = torch.randn(3, 4, dtype=D, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    old, q = OLD[:3], Q[:3]
    expected = -advantage * PUBLISHED[name](logits.softmax(-1)[:, 1], old, q).sum()
    (published,) = torch.autograd.grad(expected, logits)
    log_p = logits.log_softmax(-1)[:, 1]
    everywhere = torch.ones(3, dtype=torch.bool)
    terms = policy_loss_terms(
        old.log(), log_p, torch.full_like(old, advantage), everywhere, everywhere,
        PolicyLoss(off_shape=shape_of_method(name)), behavior_log_prob=q.log(),
    )  # fmt: skip
    (ours,) = torch.autograd.grad(terms.loss.sum(), logits)
    torch.testing.assert_close(ours, published)
    weight = trace_weight(name, log_p, old.log(), q.log())
    (by_weight,) = torch.autograd.grad((-advantage * weight * logits.log_softmax(-1)[:, 1]).sum(), logits)
    torch.testing.assert_close(ours, by_weight)


@pytest.mark.parametrize("name", PUBLISHED)
def test_extreme_probabilities_have_a_finite_weight(name):
    log_p = torch.tensor([-200.0, 0.0, 1e-7])
    weight = trace_weight(name, log_p, log_p, torch.tensor([-3.0, 0.0, 0.0]))
    assert weight.isfinite().all() and (weight >= -1e-6).all()


def test_what_is_masked_cannot_reach_a_shape_that_compares():
    log_p = torch.tensor([-1.0, -1.0]).requires_grad_(True)
    both, first = torch.tensor([True, True]), torch.tensor([True, False])
    behavior = torch.tensor([-0.5, torch.nan])
    settings = PolicyLoss(off_shape=Shape("exgrpo"))
    terms = policy_loss_terms(log_p.detach(), log_p, both.float(), first, both, settings, behavior_log_prob=behavior)
    terms.loss.sum().backward()
    r = torch.exp(torch.tensor(-0.5))
    assert log_p.grad.tolist() == pytest.approx([-float(0.1 * r / (r + 0.1) ** 2), 0.0])


@compared_shape("test_old_ratio")
def old_ratio(log_p, log_p_old, log_q, shape):
    return torch.exp(log_p - log_p_old) * shape.weight


def test_a_shape_of_ones_own_may_compare():
    config = AlgorithmConfig(off_policy_reshape={"name": "test_old_ratio", "weight": 2.0})
    shape = config.policy_loss().off_shape
    torch.testing.assert_close(shape.off_policy(P.log(), OLD.log()), 2 * P / OLD)
    torch.testing.assert_close(trace_weight("test_old_ratio", P.log(), OLD.log()), P / OLD)


# Python does not write integers of so many digits, so they have ids.
ENDLESS = [pytest.param(sign * 10**6000, id=f"{sign} endless") for sign in (1, -1)]


@pytest.mark.parametrize("gamma", [0, 0.0, -0.1, float("nan"), float("inf"), 10**400, "0.1", None, *ENDLESS])
@pytest.mark.parametrize("name", ["luffy", "trapo", "exgrpo", "p_div_p_0.1"])
def test_a_gamma_that_is_no_number_above_0_is_refused_in_one_line(name, gamma):
    with pytest.raises(UserError, match=r"^gamma of a shape must be a number above 0, got [^\n]{1,40}$"):
        trace_weight(name, P.log(), gamma=gamma)


def test_every_float_above_0_is_a_gamma():
    for gamma in (5e-324, 1, sys.float_info.max):
        assert Shape("p_div_p", gamma=gamma).chosen.settings.gamma == gamma
