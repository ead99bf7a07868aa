"""Whole distributions from hidden states: the KL to a reference and the entropy of the likeliest tokens."""

import math

import pytest
import torch

from luffy.core.logprobs import Head, anchor_kl, top_entropy


def some_head(seed, bias=True, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(7, 5, generator=g) * scale, torch.randn(23, 5, generator=g)
    return Head(hidden, weight, torch.randn(23, generator=g) if bias else None)


def of_head(given, temperature):
    hidden, weight, bias = (None if part is None else part.double() for part in given)
    return torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, -1)


@pytest.mark.parametrize("chunk_rows", [None, 1, 3])
@pytest.mark.parametrize(("bias", "temperature"), [(True, 1.0), (False, 0.7)])
def test_the_kl_and_its_gradient(chunk_rows, bias, temperature):
    ours, reference = Head(*(None if p is None else p.requires_grad_() for p in some_head(0, bias))), some_head(1, bias)
    weights = torch.linspace(-1, 1, 7)
    kl = anchor_kl(ours, reference, temperature, chunk_rows)
    p, q = of_head(ours, temperature), of_head(reference, temperature)
    expected = (q.exp() * (q - p)).sum(-1)
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-6)
    parts = [part for part in ours if part is not None]
    for grad, wanted in zip(
        torch.autograd.grad((weights * kl).sum(), parts),
        torch.autograd.grad((weights * expected).sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(grad.double(), wanted.double(), rtol=1e-5, atol=1e-6)


def test_a_token_that_the_reference_never_takes_adds_nothing():
    ours, reference = some_head(0), some_head(1)
    reference.bias[3] = -torch.inf
    kl = anchor_kl(ours, reference)
    q = of_head(reference, 1.0)
    there = torch.arange(23) != 3
    expected = (q.exp() * (q - of_head(ours, 1.0)))[:, there].sum(-1)
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(anchor_kl(ours, ours), torch.zeros(7), rtol=0, atol=1e-6)


@pytest.mark.parametrize("top", [2, 20, 50])
def test_the_entropy_of_the_likeliest(top):
    given = some_head(2, scale=3.0)
    best = of_head(given, 0.5).exp().sort(descending=True).values[:, :top]
    best = best / best.sum(-1, keepdim=True)
    expected = -(best * best.log()).sum(-1) / math.log(min(top, 23))
    found = top_entropy(given, top, 0.5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert not top_entropy(Head(given.hidden.requires_grad_(), given.weight, None), top).requires_grad
