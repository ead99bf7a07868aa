"""iw-SFT's weight by hand; its gradient is in test_sft_kinds.py."""

import math

import pytest
import torch

from luffy.learn.objective import IwSft, SftTokens, iw_sft


@pytest.mark.parametrize(("power", "cap"), [(1.0, 16.0), (2.0, 16.0), (1.0, 1.2)])
def test_one_weight_for_a_trace(power, cap):
    """Two traces; the last token of the first is not in the SFT term."""
    log_prob, ref = torch.tensor([-1.0, -2.0, 5.0, -3.0]), torch.tensor([-2.0, -2.0, -9.0, -2.0])
    tokens = SftTokens(log_prob, torch.tensor([True, True, False, True]), [3, 1], ref)
    first, second = min(math.exp(power * 0.5), cap), min(math.exp(power * -1.0), cap)
    assert iw_sft(tokens, IwSft(power, cap)).tolist() == pytest.approx([first] * 3 + [second])
