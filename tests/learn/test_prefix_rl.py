"""PrefixRL: the gradient of RL on what continues a prefix, nothing on the prefix, by settings alone."""

import pytest
import torch
from published import L, assert_gradient_is, credited, drawn_tokens

from luffy.config import load_config
from luffy.errors import ConfigError


def test_the_gradient_of_the_formula():
    prefixes = (2, 2, 2, 2)

    def published(log_p, old, ref, teacher):
        total = 0
        for a, p, o in zip((0.75, -0.25, -0.25, -0.25), log_p, old, strict=True):
            r = torch.exp(p - o)[2:]
            total = total - torch.minimum(a * r, a * r.clamp(0.8, 1.2)).sum()
        return total / (4 * L)

    gradient = assert_gradient_is("prefix_rl", published, lengths=(5, 4, 7, 6), prefixes=prefixes)
    assert all((g[:2] == 0).all() and (g[2:] != 0).any() for g in gradient)


def test_a_prefix_is_in_no_term():
    """So neither the entropy bonus nor a denominator sees it."""
    cfg = load_config("tiny/prefix_rl")
    lengths = (5, 4)
    _, *fixed = drawn_tokens(lengths)
    for sample in credited(cfg, lengths, (2, 2), (1.0, 0.0), *fixed):
        assert sample.rl_weights[:2].tolist() == [0.0, 0.0] and sample.rl_weights[2:].min() == 1
        assert sample.sft_weights.abs().sum() == 0


def test_settings_of_traces_in_the_rl_term_are_refused():
    with pytest.raises(ConfigError, match=r"'algorithm\.trace_term' none takes teacher tokens out of the RL term"):
        load_config("tiny/prefix_rl", ["algorithm.trace_ratio=ppo"])
