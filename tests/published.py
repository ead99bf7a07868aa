"""The gradient of a recipe's loss beside that of a published formula, token by token, in float64."""

import torch
from builders import make_group, make_rollout

from luffy.config import load_config
from luffy.learn.credit import ScoredTokens, credit
from luffy.learn.objective import Objective
from luffy.learn.packing import pack

L = 56  # rollout.max_tokens of the tiny size


def drawn_tokens(lengths, seed=1):
    """Log-probs of now (a float64 leaf), before the update, of the reference and of the teacher, by response."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n, low, high: low + (high - low) * torch.rand(n, generator=g)  # noqa: E731
    log_p = [draw(n, -3, -0.1).double().requires_grad_(True) for n in lengths]
    old = [(p.detach().float() + draw(len(p), -0.6, 0.6)).clamp(max=-0.01) for p in log_p]
    return log_p, old, [draw(n, -3, -0.1) for n in lengths], [draw(n, -3, -0.1) for n in lengths]


def credited(cfg, lengths, prefixes, rewards, old, ref, teacher, untaught=()):
    """Samples of one group; ``untaught``: responses that the teacher did not score."""
    taught = [None if i in untaught else t for i, t in enumerate(teacher)]
    scored = [ScoredTokens(o, r, torch.ones(len(o)), t) for o, r, t in zip(old, ref, taught, strict=True)]
    rollouts = tuple(make_rollout(n, p) for n, p in zip(lengths, prefixes, strict=True))
    (own,) = credit([make_group(rewards, rollouts)], [scored], cfg.algorithm)
    return own


def loss_over(cfg, samples, log_p, budget=1000):
    """The loss of a mini-batch, summed over its micro-batches of at most ``budget`` tokens."""
    objective, total = Objective.of(cfg), torch.zeros((), dtype=torch.float64)
    for batch in pack(samples, budget, cfg.algorithm.loss_reduction, cfg.rollout.max_tokens):
        laid = torch.cat([log_p[i] for i in batch.order])
        total = total + objective(batch, laid, torch.zeros_like(laid))[0]
    return total


def assert_gradient_is(recipe, published, lengths=(5, 3, 4, 2), prefixes=(0, 0, 0, 0), rewards=(1, 0, 0, 0), **more):
    """``published(log_p, old, ref, teacher)``, of float64 tensors by response, has the gradient of the recipe's loss,
    however the mini-batch is cut. Returns the gradient by response. ``more``: overrides, untaught."""
    cfg = load_config(f"tiny/{recipe}", ["algorithm.entropy_coef=0", *more.get("overrides", ())])
    log_p, *fixed = drawn_tokens(lengths)
    samples = credited(cfg, lengths, prefixes, [float(r) for r in rewards], *fixed, more.get("untaught", ()))
    expected = by_response(published(log_p, *([t.double() for t in each] for each in fixed)), log_p)
    for budget in (1000, 8):
        for grad, wanted in zip(by_response(loss_over(cfg, samples, log_p, budget), log_p), expected, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-8)
    return expected


def by_response(loss, log_p):
    """By response; 0 where the loss does not have it."""
    found = torch.autograd.grad(loss, log_p, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for grad, p in zip(found, log_p, strict=True)]
