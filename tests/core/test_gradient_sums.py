"""Gradients that an optimizer has taken over: added in float32, whether autograd or a product makes them."""

import pytest
import torch
from builders import DEVICE, GPU_IF_THERE
from torch import nn

from luffy.core.gradient_sums import GradientSum, Holder, gradient_sum_of
from luffy.core.logprobs import selected_log_probs

pytestmark = GPU_IF_THERE


def taken_over(weight):
    holder, parameter = Holder(None), nn.Parameter(weight)
    GradientSum.take_over(parameter, holder)
    return parameter, holder


def test_what_autograd_makes_is_added_in_float32():
    weight, holder = taken_over(torch.ones(3, dtype=torch.bfloat16, device=DEVICE))
    for scale in (256.0, 1.0, 1.0):  # in bfloat16 256 + 1 is 256
        (weight * scale).sum().backward()
        assert weight.grad is None
    assert holder.grad.tolist() == [258.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_in_float32(dtype):
    weight, holder = taken_over(torch.zeros(2, 3, dtype=dtype, device=DEVICE))
    left, right = (torch.ones(257, n, dtype=dtype, device=DEVICE) for n in (2, 3))
    right[-1] = 2**-9
    for times in (1, 2, 3):
        gradient_sum_of(weight).add_product(left[:256], right[:256])
        gradient_sum_of(weight).add_product(left[256:], right[256:])
        assert torch.equal(holder.grad, torch.full_like(holder.grad, times * (256 + 2**-9)))


@pytest.mark.parametrize("bias", [False, True])
def test_the_heads_gradient_joins_the_embeddings(bias):
    """One weight, used twice: as the head, whose chunks add products, and as the embedding, by autograd."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(11, 4, generator=generator).to(DEVICE)
    offset = torch.randn(11, generator=generator).to(DEVICE).requires_grad_() if bias else None
    tokens, targets = (torch.randint(11, (7,), generator=generator).to(DEVICE) for _ in range(2))

    def run(shared):
        log_prob, entropy = selected_log_probs(shared[tokens] * 2, shared, offset, targets, chunk_rows=3)
        (log_prob.sum() + 0.3 * entropy.sum()).backward()

    plain, (own, holder) = nn.Parameter(weight.clone()), taken_over(weight.clone())
    for _ in range(2):
        run(plain), run(own)
    assert own.grad is None
    torch.testing.assert_close(holder.grad, plain.grad)
