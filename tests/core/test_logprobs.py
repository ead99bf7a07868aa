import pytest
import torch

from luffy.core.logprobs import selected_log_probs


def plain_log_probs_and_entropy(hidden, weight, bias, targets, temperature):
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias).float() / temperature, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def inputs(rows=11, dim=6, vocab=17, bias=True):
    g = torch.Generator().manual_seed(1)
    make = lambda *s: torch.randn(*s, generator=g).requires_grad_(True)  # noqa: E731
    return (
        make(rows, dim),
        make(vocab, dim),
        make(vocab) if bias else None,
        torch.randint(0, vocab, (rows,), generator=g),
    )


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_the_full_logits(chunk, temperature, bias):
    results = []
    for f in (
        lambda *a: selected_log_probs(*a, temperature=temperature, chunk_rows=chunk),
        lambda *a: plain_log_probs_and_entropy(*a, temperature),
    ):
        hidden, weight, b, targets = inputs(bias=bias)
        logp, entropy = f(hidden, weight, b, targets)
        (torch.linspace(-1, 2, 11) @ logp + torch.linspace(2, -1, 11) @ entropy).backward()
        results.append([logp, entropy, hidden.grad, weight.grad] + ([b.grad] if bias else []))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_frozen_inputs_get_no_gradient():
    hidden, weight, _, targets = inputs(bias=False)
    logp, _ = selected_log_probs(hidden.detach(), weight, None, targets, chunk_rows=3)
    logp.sum().backward()
    (expected,) = torch.autograd.grad(
        plain_log_probs_and_entropy(hidden.detach(), weight, None, targets, 1.0)[0].sum(), weight
    )
    assert hidden.grad is None
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-5)


def test_impossible_tokens_leave_no_nan():
    hidden, weight, _, targets = inputs(bias=False)
    bias = torch.zeros(17)
    bias[3] = float("-inf")
    targets = torch.where(targets == 3, 4, targets)
    logp, entropy = selected_log_probs(hidden, weight, bias, targets, chunk_rows=5)
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(entropy).all()


def test_peak_memory_never_holds_all_logits():
    hidden, weight, targets = torch.randn(512, 8), torch.randn(4096, 8), torch.zeros(512, dtype=torch.long)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        selected_log_probs(hidden, weight, None, targets, chunk_rows=32)
    assert largest == 32 * 4096


def test_no_tokens():
    hidden, weight, _, _ = inputs(bias=False)
    logp, entropy = selected_log_probs(hidden[:0], weight, None, torch.zeros(0, dtype=torch.long))
    (logp.sum() + entropy.sum()).backward()
    assert logp.numel() == 0 and (weight.grad == 0).all()


def test_greedy_cannot_be_scored():
    with pytest.raises(ValueError, match="temperature"):
        selected_log_probs(*inputs(), temperature=0.0)
