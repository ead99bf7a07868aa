import math

import pytest
import torch

from luffy.core.losses import kl_penalty

LOGP, REF = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.2)])


@pytest.mark.parametrize(
    ("name", "value"),
    [("k1", math.log(2.5)), ("k2", 0.5 * math.log(2.5) ** 2), ("k3", 0.4 - 1 + math.log(2.5))],
)
def test_by_hand(name, value):
    assert kl_penalty(LOGP, REF, name).item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_on_an_enumerable_distribution(name):
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_penalty(p.log(), q.log(), name)).sum(), expected)


def test_unknown():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_penalty(LOGP, REF, "k4")
