import math

import pytest
import torch

from luffy.core.losses import PolicyLoss
from luffy.core.shaping import SHAPES, Shape, gradient_weight, shape
from luffy.errors import UserError

LOGP = torch.log(torch.tensor([0.9, 0.25, 0.01], dtype=torch.float64))
OLD = torch.log(torch.tensor([0.6, 0.5, 0.04], dtype=torch.float64))

OFF_POLICY = {
    "no_reshape": [0.9, 0.25, 0.01],
    "logp": [2 * math.log(0.9), 2 * math.log(0.25), 2 * math.log(0.01)],
    "p_logp": [0.9 + 2 * math.log(0.9), 0.25 + 2 * math.log(0.25), 0.01 + 2 * math.log(0.01)],
    "square_root": [math.sqrt(0.9), 0.5, 0.1],
    "pow": [0.9**0.3, 0.25**0.3, 0.01**0.3],
    "p_div_p_0.1": [0.9 / 1.0, 0.25 / 0.35, 0.01 / 0.11],
    "p_div_p_0.5": [0.9 / 1.4, 0.25 / 0.75, 0.01 / 0.51],
}
RATIO = [1.5, 0.5, 0.25]
ON_POLICY = {
    "no_reshape": RATIO,
    "logp": [math.log(r) for r in RATIO],
    "p_logp": [r + 2 * math.log(r) for r in RATIO],
    "square_root": [math.sqrt(r) for r in RATIO],
    "pow": [r**0.3 for r in RATIO],
    "p_div_p_0.1": [(0.9 / 1.0) / (0.6 / 0.7), (0.25 / 0.35) / (0.5 / 0.6), (0.01 / 0.11) / (0.04 / 0.14)],
}


@pytest.mark.parametrize("name", OFF_POLICY)
def test_off_policy_values(name):
    value = Shape(name, weight=2.0, pow_exp=0.3).off_policy(LOGP)
    torch.testing.assert_close(value, torch.tensor(OFF_POLICY[name], dtype=torch.float64))


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_values(name):
    value = Shape(name, weight=2.0, pow_exp=0.3).on_policy(LOGP, OLD)
    torch.testing.assert_close(value, torch.tensor(ON_POLICY[name], dtype=torch.float64))


@pytest.mark.parametrize("name", OFF_POLICY)
def test_gradient_stays_finite_when_the_probability_underflows(name):
    logp = torch.tensor([-200.0, -1.0], requires_grad=True)
    old = torch.tensor([-200.0, -2.0])
    shape = Shape(name)
    (shape.off_policy(logp).sum() + shape.on_policy(logp, old).sum()).backward()
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("gamma", [0.05, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("p", [1e-4, 0.05, 0.5, 0.99])
def test_logit_gradient_is_the_closed_form(gamma, p):
    """d f(p) / d logit of the chosen token = gamma p (1-p) / (p+gamma)^2 (paper Eq. 8)."""
    others = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64)
    own = torch.log(torch.tensor(p / (1 - p), dtype=torch.float64)) + torch.logsumexp(others, 0)
    logits = torch.cat([own[None], others]).requires_grad_(True)
    Shape(f"p_div_p_{gamma}").off_policy(torch.log_softmax(logits, 0)[0]).backward()
    expected = gamma * p * (1 - p) / (p + gamma) ** 2
    assert logits.grad[0].item() == pytest.approx(expected, rel=1e-9)
    weight = gradient_weight(torch.tensor([p], dtype=torch.float64), Shape(f"p_div_p_{gamma}"))
    assert weight.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["", "p_div_p_", "p_div_p_0", "p_div_p_-1", "p_div_p_nan", "sqrt", "p_div_p_1.2.3"])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(ValueError, match="known: no_reshape.*square_root.*p_div_p"):
        Shape(name)


def test_gamma_may_stand_in_the_name():
    for name, gamma in {"p_div_p_0.3": 0.3, "p_div_p_1e-2": 0.01, "p_div_p_7": 7.0, "p_div_p": 0.1}.items():
        assert Shape(name) == Shape("p_div_p", gamma=gamma)


def one_minus_root(log_p, shape):
    """Not defined for ratios above 1: the root of a negative number is NaN."""
    return 1 - torch.sqrt(-torch.expm1(log_p))


@pytest.mark.parametrize("name", ["one_minus_root", f"{__name__}:one_minus_root"])
def test_an_own_shape_serves_teachers_tokens_and_is_refused_for_ratios(name):
    if ":" not in name:
        SHAPES.register(name)(one_minus_root)
    shape = Shape(name)
    torch.testing.assert_close(shape.off_policy(LOGP), 1 - torch.sqrt(1 - LOGP.exp()))
    assert math.isfinite(gradient_weight(torch.tensor([0.5]), shape).item())
    PolicyLoss(off_shape=shape)
    with pytest.raises(UserError, match=r"on_policy_reshape.*not the policy's ratio.*no_reshape"):
        PolicyLoss(on_shape=shape)


def test_an_own_shape_of_ratios_serves_both():
    shape("third_power", ratios=True)(third_power)
    loss = PolicyLoss(on_shape=Shape("third_power"), off_shape=Shape("third_power"))
    torch.testing.assert_close(loss.on_shape.on_policy(LOGP, OLD), torch.tensor(RATIO, dtype=torch.float64) ** 3)


def third_power(log_r, shape):
    return torch.exp(3 * log_r)
