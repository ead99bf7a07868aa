"""Log-prob and entropy of chosen tokens from hidden states; the full logits never exist.

Rows are taken in chunks: forward keeps three numbers per row, backward computes the chunk's logits
again and applies the closed form. With p = softmax(z), z the logits over the temperature:

    d logp[y] / d z = onehot(y) - p            d H / d z = -p * (log p + H)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from luffy.core.gradient_sums import GradientSum, Holder, gradient_sum_of
from luffy.kernels import kernels_serve

# Rows of logits at once. A GPU wants larger products: as many rows as fit a gigabyte.
CPU_CHUNK_ROWS = 1024
GPU_CHUNK_BYTES = 1 << 30


def selected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [R, D], weight [V, D], bias [V] or None, targets [R] -> log-probs [R], entropy [R], in fp32."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive to score tokens, got {temperature}")
    chunk_rows = rows_at_once(weight) if chunk_rows is None else chunk_rows
    out: tuple[Tensor, Tensor] = _SelectedLogProbs.apply(hidden, weight, bias, targets, temperature, chunk_rows)
    return out


def rows_at_once(weight: Tensor) -> int:
    """Rows of logits that exist at a time under this head."""
    by_size = GPU_CHUNK_BYTES // (weight.shape[0] * weight.itemsize)
    return max(by_size, CPU_CHUNK_ROWS) if weight.is_cuda else CPU_CHUNK_ROWS


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def entropy_of(log_p: Tensor) -> Tensor:
    """-sum p log p over the last dimension; a token of probability 0 contributes 0."""
    p = torch.exp(log_p)
    return -torch.where(p > 0, p * log_p, torch.zeros_like(p)).sum(dim=-1)


def _score(logits: Tensor, targets: Tensor, temperature: float, out: Tensor) -> None:
    """``out`` [3, R]: log-prob, entropy and, where kernels serve, the log of the sum of exponentials."""
    log_prob, entropy, log_total = out
    if kernels_serve(logits.device):
        from luffy.kernels.head import score_rows

        score_rows(logits, targets, temperature, log_prob, entropy, log_total)
        return
    log_p = _log_softmax(logits, temperature)
    log_prob.copy_(log_p.gather(1, targets[:, None]).squeeze(1))
    entropy.copy_(entropy_of(log_p))


def _grad_logits(
    logits: Tensor, targets: Tensor, temperature: float, scores: Tensor, grad_logp: Tensor, grad_entropy: Tensor
) -> Tensor:
    """[R, V] in the dtype of the logits, which are used up; ``scores`` [3, R] as `_score` left them."""
    entropy, log_total = scores[1], scores[2]
    if kernels_serve(logits.device):
        from luffy.kernels.head import grad_logits_

        return grad_logits_(
            logits, targets, temperature, entropy, log_total, grad_logp.contiguous(), grad_entropy.contiguous()
        )  # fmt: skip
    log_p = _log_softmax(logits, temperature)
    p = torch.exp(log_p)
    # p * -inf would be NaN
    centred = (log_p + entropy[:, None]).clamp(min=-math.log(torch.finfo(torch.float32).max))
    grad = -p * (grad_logp[:, None] + grad_entropy[:, None] * centred)
    grad.scatter_add_(1, targets[:, None], grad_logp[:, None])
    return (grad / temperature).to(logits.dtype)


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        scores = torch.empty(3, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for part in _parts(hidden.shape[0], chunk_rows):
            _score(F.linear(hidden[part], weight, bias), targets[part], temperature, scores[:, part])
        ctx.save_for_backward(hidden, weight, bias, targets, scores)
        ctx.temperature, ctx.chunk_rows, ctx.sum = temperature, chunk_rows, gradient_sum_of(weight)
        return scores[0], scores[1]

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, scores = ctx.saved_tensors

        def grad_logits(part: slice, logits: Tensor) -> Tensor:
            return _grad_logits(
                logits, targets[part], ctx.temperature, scores[:, part], grad_logp[part], grad_entropy[part]
            )

        return *_head_gradients(ctx, hidden, weight, bias, grad_logits), None, None, None


def _head_gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, grad_logits: Callable[[slice, Tensor], Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, head weight and bias, the first three inputs, from those of each chunk's logits."""
    want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
    grad_hidden = torch.empty_like(hidden) if want_hidden else None
    # Sums over many chunks: accumulate in fp32 whatever the model's dtype.
    wants_own = want_weight and ctx.sum is None
    own = Holder(torch.zeros_like(weight, dtype=torch.float32) if wants_own else None)
    sum_weight = ctx.sum or GradientSum(own)
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias and bias is not None else None
    for part in _parts(hidden.shape[0], ctx.chunk_rows):
        grad = grad_logits(part, F.linear(hidden[part], weight, bias))
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[part])
        if want_weight:
            sum_weight.add_product(grad, hidden[part])
        if grad_bias is not None:
            grad_bias += grad.float().sum(dim=0)
    return (
        grad_hidden,
        None if own.grad is None else own.grad.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


class Head(NamedTuple):
    """What the next-token distributions of some tokens are made of: hidden [R, D], weight [V, D], bias [V] or None."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


@torch.no_grad()
def top_entropy(head: Head, top: int, temperature: float = 1.0) -> Tensor:
    """[R] in 0 to 1: the entropy of the ``top`` likeliest tokens, their probabilities made to sum to 1, over its
    largest value. Without a gradient."""
    top = min(top, head.weight.shape[0])
    found = []
    for part in _parts(head.hidden.shape[0], rows_at_once(head.weight)):
        logits = F.linear(head.hidden[part], head.weight, head.bias)
        found.append(entropy_of(_log_softmax(logits.topk(top, dim=-1).values, temperature)) / math.log(max(top, 2)))
    return torch.cat(found) if found else head.hidden.new_zeros(0, dtype=torch.float32)


def anchor_kl(head: Head, reference: Head, temperature: float = 1.0, chunk_rows: int | None = None) -> Tensor:
    """[R] fp32: KL(reference || head) of the next token, over the whole vocabulary. The gradient is that of ``head``
    alone; its logits, and those of the reference, exist for a chunk of rows at a time."""
    rows = rows_at_once(head.weight) // 2 if chunk_rows is None else chunk_rows
    kl: Tensor = _AnchorKl.apply(*head, *reference, temperature, max(rows, 1))
    return kl


class _AnchorKl(torch.autograd.Function):
    """d KL(q || p) / d z = p - q, with p = softmax(z) and q of the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        ref_bias: Tensor | None,
        temperature: float,
        chunk_rows: int,
    ) -> Tensor:
        kl = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for part in _parts(hidden.shape[0], chunk_rows):
            log_p = _log_softmax(F.linear(hidden[part], weight, bias), temperature)
            log_q = _log_softmax(F.linear(ref_hidden[part], ref_weight, ref_bias), temperature)
            q = torch.exp(log_q)
            kl[part] = torch.where(q > 0, q * (log_q - log_p), 0.0).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, ref_hidden, ref_weight, ref_bias)
        ctx.temperature, ctx.chunk_rows, ctx.sum = temperature, chunk_rows, gradient_sum_of(weight)
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *reference = ctx.saved_tensors
        ref_hidden, ref_weight, ref_bias = reference

        def grad_logits(part: slice, logits: Tensor) -> Tensor:
            p = torch.exp(_log_softmax(logits, ctx.temperature))
            q = torch.exp(_log_softmax(F.linear(ref_hidden[part], ref_weight, ref_bias), ctx.temperature))
            grad: Tensor = (p - q) * (grad_kl[part, None] / ctx.temperature)
            return grad.to(logits.dtype)

        return *_head_gradients(ctx, hidden, weight, bias, grad_logits), None, None, None, None, None


def _parts(rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, start + chunk_rows) for start in range(0, rows, chunk_rows)]
