import math

import pytest
import tanh_shape  # noqa: F401, it registers the part
import torch

from luffy.core.shaping import Shape


def test_tanh():
    log_p = torch.tensor([math.log(0.25), -200.0], requires_grad=True)
    shaped = Shape("tanh").off_policy(log_p)
    assert shaped.tolist() == pytest.approx([math.tanh(1.0), 0.0])
    shaped.sum().backward()
    assert log_p.grad.isfinite().all()
