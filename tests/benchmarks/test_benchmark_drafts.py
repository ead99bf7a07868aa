"""The imposed rate is the one that was asked for."""

import numpy as np
import pytest

from benchmarks.drafts import imposed_standing


@pytest.mark.parametrize("mean", [1.0, 1.5, 2.2, 4.0])
def test_as_many_tokens_stand_as_are_imposed(mean):
    standing = imposed_standing(mean, 8)
    kept = standing(None, np.zeros((40_000, 8)))
    assert kept.mean() == pytest.approx(mean, rel=0.02) and kept.min() >= 1 and kept.max() <= 8
    assert standing(None, np.zeros((40_000, 4))).max() <= 4
