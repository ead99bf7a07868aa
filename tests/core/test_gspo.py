"""GSPO: the gradient of its formula, responses kept apart, and the clip of whole responses."""

import pytest
import torch
from published import assert_gradient_is

from luffy.config import load_config
from luffy.core.losses import ON_POLICY_TERMS, PolicyLoss, policy_loss_terms
from luffy.errors import ConfigError

GSPO = ON_POLICY_TERMS.read("gspo", "")


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.05, 0.3)])
def test_the_gradient_of_the_formula(low, high):
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    def published(log_p, old, ref, teacher):
        total = 0
        for a, p, o in zip(advantages, log_p, old, strict=True):
            s = torch.exp((p.sum() - o.sum()) / len(p))
            total = total - torch.minimum(a * s, a * s.clamp(1 - low, 1 + high))
        return total / 4

    clip = [f"algorithm.clip_ratio={low}", f"algorithm.clip_ratio_high={high}"]
    gradient = assert_gradient_is("gspo", published, rewards=rewards.tolist(), overrides=clip)
    some = [bool((g != 0).any()) for g in gradient]
    assert True in some and False in some  # the clip drops whole responses
    assert all(len(set(g.tolist())) == 1 for g in gradient)


def test_a_trace_and_its_prefix_are_not_in_the_mean():
    """A response's ratio is over the tokens that the policy wrote, whatever the trace before them."""

    def published(log_p, old, ref, teacher):
        total = 0
        for a, p, o, prefix in zip([0.75, -0.25, -0.25, -0.25], log_p, old, [4, 0, 0, 0], strict=True):
            s = torch.exp((p - o)[prefix:].mean())
            own = -torch.minimum(a * s, a * s.clamp(0.5, 1.5)) * (len(p) - prefix)
            total = total + own - (a * torch.sigmoid(p[:prefix] - torch.tensor(0.1).double().log())).sum()
        return total / (4 * 56)

    overrides = ["algorithm.on_policy_term=gspo", "algorithm.remove_clip=false", "algorithm.clip_ratio=0.5"]
    assert_gradient_is("luffy", published, lengths=(7, 3, 4, 2), prefixes=(4, 0, 0, 0), overrides=overrides)


def test_rows_of_a_padded_batch_are_responses():
    log_p = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.5, -0.5]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.full_like(log_p, -1.0), torch.tensor([[True, True, False], [True, True, True]])
    settings = PolicyLoss(remove_clip=True, on_term=GSPO)
    given = (old, log_p, torch.ones_like(old), mask)
    terms = policy_loss_terms(*given, torch.zeros_like(mask), settings)
    ratios = torch.tensor([-0.5, 0.5]).double().exp()
    torch.testing.assert_close(terms.loss, -ratios[:, None] * mask)


def test_a_shape_of_the_ratio_is_refused():
    with pytest.raises(ConfigError, match=r"'algorithm\.on_policy_term' gspo has a ratio of its own"):
        load_config("tiny/gspo", ["algorithm.on_policy_reshape=square_root"])
