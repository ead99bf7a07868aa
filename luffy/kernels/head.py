"""Log-prob and entropy of chosen tokens from logits read once, and their gradient written over the logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _rows(logits, targets, log_prob, entropy, log_total, vocabulary, scale, BLOCK: tl.constexpr):
    """One row, stretch by stretch, with a running maximum. Sum of p * z gives the entropy: log Z - E[z]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    mean = 0.0
    for start in range(0, vocabulary, BLOCK):
        token = start + at
        inside = token < vocabulary
        z = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32) * scale
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp(top - shift)
        weight = tl.exp(z - shift)
        total = total * decay + tl.sum(weight, axis=0)
        mean = mean * decay + tl.sum(tl.where(weight > 0, weight * z, 0.0), axis=0)
        top = new_top
    log_z = top + tl.log(total)
    chosen = tl.load(logits + row * vocabulary + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(log_prob + row, chosen - log_z)
    tl.store(entropy + row, log_z - mean / total)
    tl.store(log_total + row, log_z)


@triton.jit
def _grad(
    logits, targets, entropy, log_total, grad_log_prob, grad_entropy, vocabulary, scale, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    place = logits + row * vocabulary + token
    z = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32) * scale
    log_p = z - tl.load(log_total + row)
    p = tl.exp(log_p)
    d_chosen, d_entropy = tl.load(grad_log_prob + row), tl.load(grad_entropy + row)
    centred = tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0)
    grad = -(p * d_chosen + d_entropy * centred)
    grad += tl.where(token == tl.load(targets + row), d_chosen, 0.0)
    tl.store(place, (grad * scale).to(logits.dtype.element_ty), mask=inside)


def score_rows(
    logits: Tensor, targets: Tensor, temperature: float, log_prob: Tensor, entropy: Tensor, log_total: Tensor
) -> None:
    """Fill ``log_prob``, ``entropy`` and ``log_total`` [R] for logits [R, V] at a temperature."""
    rows, vocabulary = logits.shape
    _rows[(rows,)](
        logits, targets, log_prob, entropy, log_total, vocabulary, 1.0 / temperature, BLOCK=BLOCK, num_warps=8
    )


def grad_logits_(
    logits: Tensor, targets: Tensor, temperature: float, entropy: Tensor, log_total: Tensor,
    grad_log_prob: Tensor, grad_entropy: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient with respect to the logits [R, V], in their place."""
    rows, vocabulary = logits.shape
    _grad[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits, targets, entropy, log_total, grad_log_prob, grad_entropy, vocabulary, 1.0 / temperature,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return logits
