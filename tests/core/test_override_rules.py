"""The rules against brute force: run every proposal, every verdict and every override of a small vocabulary."""

import math

import pytest
import torch

from luffy.core.override_rules import RULES, Rule

CASES = [
    Rule("speculative"),
    *(Rule("threshold", tau=tau) for tau in (0.0, 0.05, 0.3, 1.0)),
    *(Rule("mixture", eps=eps) for eps in (0.0, 0.25, 1.0)),
]
INF = math.inf


def distributions(seed: int, rows: int = 5, vocabulary: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64)
    return tuple(torch.log_softmax(logits, -1))


def enumerate_behavior(rule: Rule, log_d: torch.Tensor, log_g: torch.Tensor) -> torch.Tensor:
    """b [V] of one context: the sum over proposals of what follows them."""
    total = torch.zeros_like(log_d)
    override = rule.override_log_probs(log_d, log_g).exp()
    for token in range(len(log_d)):
        kept = rule.accept_probability(log_d, log_g, torch.tensor(token))
        total[token] += log_d[token].exp() * kept
        total += log_d[token].exp() * (1 - kept) * override
    return total


@pytest.mark.parametrize("rule", CASES, ids=str)
def test_the_behaviour_is_the_sum_over_all_proposals(rule):
    log_d, log_g = distributions(0)
    for d, g in zip(log_d, log_g, strict=True):
        tokens = torch.arange(7)
        closed = rule.behavior_log_probs(d.expand(7, -1), g.expand(7, -1), tokens).exp()
        torch.testing.assert_close(closed, enumerate_behavior(rule, d, g), atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(closed.sum(), torch.tensor(1.0, dtype=torch.float64))
        torch.testing.assert_close(rule.override_log_probs(d, g).exp().sum(), torch.tensor(1.0, dtype=torch.float64))


def test_a_token_at_the_threshold_itself_is_kept():
    d = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    g = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64).log()
    rule, every = Rule("threshold", tau=0.25), torch.arange(3)
    assert rule.accept_probability(d.expand(3, -1), g.expand(3, -1), every).tolist() == [1.0, 1.0, 1.0]
    behavior = rule.behavior_log_probs(d.expand(3, -1), g.expand(3, -1), every).exp()
    torch.testing.assert_close(behavior, d.exp(), atol=1e-12, rtol=1e-12)  # nothing is rejected


def test_the_formulas_by_hand():
    d, g = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.1, 0.3, 0.6]).log()
    every = torch.arange(3)
    rows_d, rows_g = d.expand(3, -1), g.expand(3, -1)
    speculative = Rule("speculative")
    assert speculative.accept_probability(rows_d, rows_g, every).tolist() == pytest.approx([0.2, 1.0, 1.0])
    assert speculative.override_log_probs(d, g).exp().tolist() == pytest.approx([0.0, 0.0, 1.0], abs=1e-6)
    threshold = Rule("threshold", tau=0.2)
    assert threshold.accept_probability(rows_d, rows_g, every).tolist() == [0.0, 1.0, 1.0]
    expected = [0.5 * 0.1, 0.3 + 0.5 * 0.3, 0.2 + 0.5 * 0.6]
    assert threshold.behavior_log_probs(rows_d, rows_g, every).exp().tolist() == pytest.approx(expected)
    mixture = Rule("mixture", eps=0.25)
    expected = [0.75 * 0.5 + 0.25 * 0.1, 0.3, 0.75 * 0.2 + 0.25 * 0.6]
    assert mixture.behavior_log_probs(rows_d, rows_g, every).exp().tolist() == pytest.approx(expected)


def test_a_rule_without_its_parameter_has_a_tenth():
    d, g, every = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.05, 0.35, 0.6]).log(), torch.arange(3)
    rows_d, rows_g = d.expand(3, -1), g.expand(3, -1)
    mixture = Rule("mixture")
    assert mixture.accept_probability(rows_d, rows_g, every).tolist() == pytest.approx([0.9] * 3)
    expected = [0.9 * 0.5 + 0.1 * 0.05, 0.9 * 0.3 + 0.1 * 0.35, 0.9 * 0.2 + 0.1 * 0.6]
    assert mixture.behavior_log_probs(rows_d, rows_g, every).exp().tolist() == pytest.approx(expected)
    edge = torch.tensor([0.0999, 0.1001, 0.8]).log()
    assert Rule("threshold").accept_probability(rows_d, edge.expand(3, -1), every).tolist() == [0.0, 1.0, 1.0]


def test_batches_of_any_shape_equal_one_by_one():
    log_d, log_g = distributions(1, rows=6)
    tokens = torch.arange(6)
    for rule in CASES:
        whole = rule.behavior_log_probs(log_d.view(2, 3, 7), log_g.view(2, 3, 7), tokens.view(2, 3))
        one_by_one = [rule.behavior_log_probs(d, g, t) for d, g, t in zip(log_d, log_g, tokens, strict=True)]
        torch.testing.assert_close(whole.flatten(), torch.stack(one_by_one))


@pytest.mark.parametrize("rule", CASES, ids=str)
def test_probabilities_that_underflow_give_no_nan(rule):
    tiny = -200.0  # exp of it is 0 in float32
    half = math.log(0.5)
    d = torch.tensor([[0.0, tiny, -INF, -INF], [half, half, -INF, tiny], [half, half, -INF, -INF]])
    g = torch.tensor([[tiny, 0.0, -INF, tiny], [-INF, -INF, half, half], [half, half, -INF, -INF]])
    for token in range(4):
        tokens = torch.full((3,), token)
        accept = rule.accept_probability(d, g, tokens)
        assert ((accept >= 0) & (accept <= 1)).all()
        assert not rule.behavior_log_probs(d, g, tokens).isnan().any()
    override = rule.override_log_probs(d, g)
    assert not override.isnan().any()
    torch.testing.assert_close(override.exp().sum(-1), torch.ones(3))


def test_equal_models_leave_no_residual_and_reject_nothing():
    log_d, _ = distributions(2)
    rule = Rule("speculative")
    assert (rule.accept_probability(log_d, log_d, torch.arange(5)) == 1).all()
    assert torch.equal(rule.override_log_probs(log_d, log_d), log_d)


def test_a_rare_residual_keeps_its_digits():
    """g - d of two numbers that agree to 1 part in 10^5, far below 1: plain subtraction in float32 loses it."""
    d = torch.tensor([0.5, 1e-6, 0.499999], dtype=torch.float64)
    g = torch.tensor([0.5 - 3e-11, 1e-6 + 1e-11, 0.499999 + 2e-11], dtype=torch.float64)
    got = Rule("speculative").override_log_probs(d.log(), g.log()).exp()
    torch.testing.assert_close(got, torch.tensor([0.0, 1 / 3, 2 / 3], dtype=torch.float64), atol=1e-4, rtol=0)


def test_the_ends_of_the_scales():
    log_d, log_g = distributions(3)
    tokens = torch.arange(5)
    chosen_d, chosen_g = (x.gather(-1, tokens[:, None]).squeeze(-1) for x in (log_d, log_g))
    for idle in (Rule("mixture", eps=0.0), Rule("threshold", tau=0.0)):
        assert torch.equal(idle.behavior_log_probs(log_d, log_g, tokens), chosen_d)
        assert (idle.accept_probability(log_d, log_g, tokens) == 1).all()
    torch.testing.assert_close(Rule("mixture", eps=1.0).behavior_log_probs(log_d, log_g, tokens), chosen_g)
    torch.testing.assert_close(Rule("threshold", tau=1.0).behavior_log_probs(log_d, log_g, tokens), chosen_g)


def test_bad_rules_are_refused():
    with pytest.raises(ValueError, match="unknown override rule 'medusa'; known: speculative, threshold, mixture"):
        Rule("medusa")
    for knobs in ({"tau": -0.1}, {"tau": 1.5}, {"eps": 2.0}, {"eps": math.nan}):
        with pytest.raises(ValueError, match=f"{next(iter(knobs))} is .*between 0 and 1"):
            Rule(RULES[0], **knobs)
