"""On-policy distillation: its gradient enumerated, its credit by hand."""

import itertools
from dataclasses import replace

import pytest
import torch
from builders import make_group, make_rollout, pack_in_order

from luffy.config import AlgorithmConfig
from luffy.core.losses import PolicyLoss
from luffy.learn.credit import ScoredTokens, credit, credit_metrics
from luffy.learn.objective import Objective

D = torch.float64
VOCABULARY, LENGTH = 3, 3
CONTEXTS = [c for n in range(LENGTH) for c in itertools.product(range(VOCABULARY), repeat=n)]
SEQUENCES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
ROWS = torch.tensor([[CONTEXTS.index(s[:t]) for t in range(LENGTH)] for s in SEQUENCES])
TOKENS = torch.tensor(SEQUENCES)


def logits_table(seed):
    """Logits of the next token after every context."""
    return torch.randn(len(CONTEXTS), VOCABULARY, dtype=D, generator=torch.Generator().manual_seed(seed))


def of_tokens(log_probs):
    """[sequences, LENGTH]: of every token of every sequence."""
    return log_probs[ROWS].gather(-1, TOKENS[..., None])[..., 0]


def expected_gradient(objective, samples, log_p, logits):
    """Minus the loss's gradient, in expectation over the policy's own sequences."""
    chances = log_p.detach().sum(-1).exp()
    assert float(chances.sum()) == pytest.approx(1.0)
    batch = pack_in_order(samples, None, LENGTH)
    weights = batch.rl_weights * chances.repeat_interleave(LENGTH)
    current = log_p.flatten()
    loss, _ = objective(replace(batch, rl_weights=weights), current, torch.zeros_like(current))
    (gradient,) = torch.autograd.grad(-loss, logits, retain_graph=True)
    return gradient


def test_the_expected_gradient_is_minus_that_of_the_kl_of_every_next_token():
    """Of KL(p || q) of the next token after each context, summed over contexts by how often the policy gets there; how
    the policy's choices change where it gets is left out (no future), which the KL of whole sequences has."""
    logits = logits_table(0).requires_grad_(True)
    p, q = torch.log_softmax(logits, -1), torch.log_softmax(logits_table(1), -1)
    log_p, log_q = of_tokens(p), of_tokens(q)
    rollouts = [make_rollout(s) for s in SEQUENCES]
    group = make_group([float(i % 2) for i in range(len(rollouts))], rollouts)
    tokens = [ScoredTokens(old=o, teacher=t) for o, t in zip(log_p.detach(), log_q, strict=True)]
    (samples,) = credit([group], [tokens], AlgorithmConfig(credit="distill"))
    gradient = expected_gradient(Objective(PolicyLoss(remove_clip=True)), samples, log_p, logits)

    arrive = {c: 1.0 for c in CONTEXTS}
    for context in CONTEXTS[1:]:
        last = p.detach()[CONTEXTS.index(context[:-1]), context[-1]]
        arrive[context] = float(arrive[context[:-1]] * last.exp())
    kl = (p.exp() * (p - q)).sum(-1)
    (exact,) = torch.autograd.grad(
        -(torch.tensor(list(arrive.values()), dtype=D) * kl).sum(), logits, retain_graph=True
    )
    torch.testing.assert_close(gradient, exact, atol=1e-6, rtol=1e-6)

    whole = (log_p.sum(-1).exp() * (log_p - log_q).sum(-1)).sum()
    (of_sequences,) = torch.autograd.grad(-whole, logits, retain_graph=True)
    assert float((gradient - of_sequences).norm() / of_sequences.norm()) > 0.05

    # The same by settings alone: the teacher as the reference of a KL term, k2 in the loss, no advantage.
    settings = AlgorithmConfig(kl_coef=1.0, kl_estimator="k2", prefix_beta=0.0)
    as_reference = [ScoredTokens(old=o, ref=t) for o, t in zip(log_p.detach(), log_q, strict=True)]
    (samples,) = credit([group], [as_reference], settings)
    objective = Objective(PolicyLoss(remove_clip=True), kl_coef=1.0, kl_estimator="k2")
    torch.testing.assert_close(expected_gradient(objective, samples, log_p, logits), exact, atol=1e-6, rtol=1e-6)


OLD, TEACHER = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -0.5, -3.0])
GAP = [-0.5, 1.5, 0.0]


def mixed_group():
    """A trace, a sample that continues one token of it, a plain one, and one that has no teacher."""
    rollouts = (make_rollout(prefix=3), make_rollout(prefix=1), make_rollout(), make_rollout())
    tokens = [ScoredTokens(old=OLD, teacher=TEACHER)] * 3 + [ScoredTokens(old=OLD)]
    return make_group([1.0, 0.0, 1.0, 0.0], rollouts), tokens


def test_credit_by_hand():
    group, tokens = mixed_group()
    (alone,) = credit([group], [tokens], AlgorithmConfig(credit="distill"))
    assert [s.advantages.tolist() for s in alone] == [[0.0] * 3, [0.0, 1.5, 0.0], GAP, [0.0] * 3]
    assert [s.rl_weights.tolist() for s in alone] == [[0.0] * 3, [0.0, 1.0, 1.0], [1.0] * 3, [0.0] * 3]
    (rewarded,) = credit([group], [tokens], AlgorithmConfig(credit={"name": "distill", "reward": 2.0}))
    advantages = [[1.0] * 3, [-1.0, 0.5, -1.0], [0.5, 2.5, 1.0], [-1.0] * 3]  # the group's are 0.5 and -0.5
    assert [s.advantages.tolist() for s in rewarded] == advantages
    assert all(s.rl_weights.tolist() == [1.0] * 3 for s in rewarded)


def test_metrics_by_hand():
    group, tokens = mixed_group()
    cfg = AlgorithmConfig(credit="distill")
    samples = credit([group], [tokens], cfg)
    metrics = credit_metrics(samples, [tokens], cfg)
    assert metrics["method/teacher_gap"].value == pytest.approx((1.5 + 0.0 + sum(GAP)) / 5)  # own tokens with a teacher
    assert metrics["method/teacher_share"].value == pytest.approx(5 / 8)
    means = [0.0, 0.5, sum(GAP) / 3, 0.0]  # of each response's tokens
    assert metrics["critic/advantages/mean"].value == pytest.approx(sum(means) / 4)
    assert metrics["critic/advantages/max"].value == pytest.approx(max(means))
    plain = AlgorithmConfig()
    assert "method/teacher_gap" not in credit_metrics(credit([group], [tokens], plain), [tokens], plain)
