import pytest
import torch
from torch import nn

from luffy.config.knobs import OptimConfig
from luffy.learn.optim import Optimizer, lr_at


def lrs(total=10, **changes):
    cfg = OptimConfig(lr=1.0, **changes)
    return [lr_at(step, total, cfg) for step in range(total)]


def test_constant():
    assert lrs() == [1.0] * 10


def test_warm_up_by_number_and_by_share():
    assert lrs(warmup=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert lrs(warmup=0.2)[:3] == [0.5, 1.0, 1.0]


def test_linear_and_cosine_fall_to_their_floor():
    linear = lrs(schedule="linear", min_lr_ratio=0.1)
    assert linear[0] == 1.0 and linear[5] == pytest.approx(0.1 + 0.9 * 0.5) and linear[9] == pytest.approx(0.19)
    cosine = lrs(schedule="cosine")
    assert cosine[5] == pytest.approx(0.5) and cosine == sorted(cosine, reverse=True)


def test_the_time_decayed_rates_of_appendix_b():
    """alpha_k in proportion to 1 / sqrt(k) and to 1 / k, k from 1, without knowing how long the run is."""
    assert lrs(schedule="inverse_sqrt") == pytest.approx([k**-0.5 for k in range(1, 11)])
    assert lrs(schedule="inverse") == pytest.approx([1 / k for k in range(1, 11)])
    assert lrs(total=20, schedule="inverse_sqrt")[:10] == lrs(schedule="inverse_sqrt")
    warmed = lrs(schedule="inverse", warmup=0.25)  # 2.5 steps: the third is the last of the warm-up
    assert warmed[:6] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1 / 2, 1 / 3])
    assert lrs(schedule="inverse", min_lr_ratio=0.5)[3] == pytest.approx(0.5 + 0.5 / 4)


def two_weights():
    """Gradients of 3 and 4, and a weight that no loss reached."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))])
    (3 * model[0].sum() + 4 * model[1].sum()).backward()
    return model


def test_the_gradient_norm_is_over_all_weights_that_have_one():
    assert float(Optimizer(two_weights(), OptimConfig()).grad_norm()) == pytest.approx(5.0)


@pytest.mark.parametrize(("clip", "left"), [(0.5, 0.5), (50.0, 5.0), (0.0, 5.0)])
def test_gradients_are_clipped_to_their_bound(clip, left):
    optimizer = Optimizer(two_weights(), OptimConfig(grad_clip=clip))
    optimizer.step(1e-3, optimizer.grad_norm())
    assert float(optimizer.grad_norm()) == pytest.approx(left, rel=1e-4)


def test_loading_replaces_all_that_the_optimizer_knew():
    fresh, used = Optimizer(two_weights(), OptimConfig()), Optimizer(two_weights(), OptimConfig())
    saved = dict(fresh.tensors())
    used.step(1e-3, used.grad_norm())
    assert not saved and dict(used.tensors())
    used.load_tensors(saved)
    assert not dict(used.tensors())
