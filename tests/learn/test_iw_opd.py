"""IW-OPD: the gradient of its formula, and its weights by hand."""

import pytest
import torch
from published import L, assert_gradient_is

from luffy.learn.estimators.iw_opd import earliness


@pytest.mark.parametrize("early", [0.5, 2.0])
def test_the_gradient_of_the_formula(early):
    """The first response begins with two tokens of a trace, which are in no sum; the third was not scored."""
    prefixes = (2, 0, 0, 0)

    def published(log_p, old, ref, teacher):
        total = 0
        for i in (0, 1, 3):
            p, a = log_p[i][prefixes[i] :], (teacher[i] - old[i])[prefixes[i] :]
            for t in range(len(p)):
                w = 1 + early * (1 - a[:t].abs().sum() / a.abs().sum())
                total = total - w * a[t] * p[t]
        return total / (3 * L)

    given = {"prefixes": prefixes, "untaught": (2,), "overrides": [f"algorithm.credit.early={early}"]}
    assert_gradient_is("iw_opd", published, rewards=(0, 0, 0, 0), **given)


def test_weights_by_hand():
    assert earliness(torch.tensor([1.0, -2.0, 1.0]), 0.5).tolist() == [1.5, 1.375, 1.125]
    assert earliness(torch.zeros(2), 0.5).tolist() == [1.5, 1.5]  # of an advantage of 0
