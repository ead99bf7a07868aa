"""EAFT's weight by hand; its gradient is in test_sft_kinds.py."""

import torch

from luffy.config import load_config
from luffy.learn.objective import Eaft, Objective, SftTokens, eaft


def test_the_weight_is_the_entropy_of_the_likeliest_tokens():
    entropy = torch.tensor([0.0, 0.5, 1.0])
    tokens = SftTokens(-torch.ones(3), torch.ones(3).bool(), [3], top_entropy=entropy)
    assert eaft(tokens, Eaft()) is entropy


def test_the_recipe_asks_for_twenty():
    assert Objective.of(load_config("small/eaft")).top == 20
    assert Objective.of(load_config("small/eaft", ["algorithm.sft_weight.top=5"])).top == 5
    assert Objective.of(load_config("small/sft")).top == 0
