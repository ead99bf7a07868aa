import pytest

from luffy.config import OptimConfig
from luffy.train.optim import lr_at


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
