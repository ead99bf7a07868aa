import pytest
import torch

from luffy.core.losses import Importance, PolicyLoss, policy_loss_terms
from luffy.metrics import EffectiveShare

D = torch.float64
OLD = torch.log(torch.tensor([0.5, 0.2, 0.9], dtype=D))
BEHAVIOR = torch.log(torch.tensor([0.25, 0.4, 0.9], dtype=D))


def test_weights_by_hand_and_their_bounds():
    torch.testing.assert_close(Importance().weights(OLD, BEHAVIOR, (1, 2)), torch.tensor([2.0, 0.5, 1.0], dtype=D))
    bounded = Importance(clamp_min=0.8, clamp_max=1.5).weights(OLD, BEHAVIOR, (1, 2))
    torch.testing.assert_close(bounded, torch.tensor([1.5, 0.8, 1.0], dtype=D))


def test_a_mask_drops_what_lies_outside_its_bounds_and_keeps_the_bounds():
    masked = Importance(clamp_min=0.6, clamp_max=1.5, mask=True).weights(OLD, BEHAVIOR, (1, 2))
    torch.testing.assert_close(masked, torch.tensor([0.0, 0.0, 1.0], dtype=D))
    for bounds in ({"clamp_max": 1.0}, {"clamp_min": 1.0}):  # equal log-probs: a weight of exactly 1
        assert Importance(**bounds, mask=True).weights(OLD, OLD, (3,)).tolist() == [1.0, 1.0, 1.0]


def test_the_weight_of_a_sequence_is_the_product_over_it():
    whole = Importance(level="sequence")
    torch.testing.assert_close(whole.weights(OLD, BEHAVIOR, (1, 2)), torch.tensor([2.0, 0.5, 0.5], dtype=D))
    torch.testing.assert_close(whole.weights(OLD, BEHAVIOR, (3,)), torch.ones(3, dtype=D))
    bounded = Importance(level="sequence", clamp_min=0.9, clamp_max=1.5).weights(OLD, BEHAVIOR, (2, 1))
    torch.testing.assert_close(bounded, torch.ones(3, dtype=D))  # the product is bounded, not its factors


def test_detach():
    old = OLD.clone().requires_grad_(True)
    assert not Importance().weights(old, BEHAVIOR, (1, 2)).requires_grad
    Importance(detach=False).weights(old, BEHAVIOR, (1, 2)).sum().backward()
    torch.testing.assert_close(old.grad, torch.tensor([2.0, 0.5, 1.0], dtype=D))


def test_effective_share():
    assert EffectiveShare(4.0, 4.0, 4.0).value == 1.0
    assert EffectiveShare(1.0, 1.0, 4.0).value == 0.25  # one weight counts, three do not
    assert EffectiveShare(1.0, 1.0, 1.0).merge(EffectiveShare(0.0, 0.0, 3.0)).value == 0.25
    assert EffectiveShare(0.0, 0.0, 0.0).value == 0.0


@pytest.mark.parametrize(("literal", "is_exact"), [(False, True), (True, False)])
def test_expected_gradient_is_the_policy_gradient_only_when_corrected_once(literal, is_exact):
    """Enumerated over all actions, weighted by how likely the behaviour draws them: no Monte-Carlo error."""
    logits = torch.tensor([0.3, -0.5, 0.8, 0.1], dtype=D, requires_grad=True)
    reward = torch.tensor([1.0, 0.0, 0.25, -0.5], dtype=D)
    log_pi = torch.log_softmax(logits, 0)
    (true_gradient,) = torch.autograd.grad((log_pi.exp() * reward).sum(), logits, retain_graph=True)
    behavior = (0.6 * log_pi.detach().exp() + 0.4 * torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=D)).log()
    old = log_pi.detach()
    importance = Importance(literal=literal)
    terms = policy_loss_terms(
        importance.ratio_base(old, behavior),
        log_pi,
        reward * importance.weights(old, behavior, (1,) * 4),
        torch.ones(4),
        torch.zeros(4, dtype=torch.bool),
        PolicyLoss(remove_clip=True),
    )
    (gradient,) = torch.autograd.grad(-(terms.loss * behavior.exp()).sum(), logits)
    assert torch.allclose(gradient, true_gradient, atol=1e-12) is is_exact
