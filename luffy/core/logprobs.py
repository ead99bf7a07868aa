"""Log-prob and entropy of chosen tokens from hidden states; the full logits never exist.

Rows are taken in chunks: forward keeps two numbers per row, backward computes the chunk's logits
again and applies the closed form. With p = softmax(z), z the logits over the temperature:

    d logp[y] / d z = onehot(y) - p            d H / d z = -p * (log p + H)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

DEFAULT_CHUNK_ROWS = 1024


def selected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """hidden [R, D], weight [V, D], bias [V] or None, targets [R] -> log-probs [R], entropy [R], in fp32."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive to score tokens, got {temperature}")
    out: tuple[Tensor, Tensor] = _SelectedLogProbs.apply(hidden, weight, bias, targets, temperature, chunk_rows)
    return out


def _chunk_log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1)


def entropy_of(log_p: Tensor) -> Tensor:
    """-sum p log p over the last dimension; a token of probability 0 contributes 0."""
    p = torch.exp(log_p)
    return -torch.where(p > 0, p * log_p, torch.zeros_like(p)).sum(dim=-1)


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
        rows = hidden.shape[0]
        logp = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logp)
        for start in range(0, rows, chunk_rows):
            part = slice(start, start + chunk_rows)
            log_p = _chunk_log_softmax(hidden[part], weight, bias, temperature)
            logp[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = entropy_of(log_p)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        # Sums over many chunks: accumulate in fp32 whatever the model's dtype.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias else None
        for start in range(0, hidden.shape[0], ctx.chunk_rows):
            part = slice(start, start + ctx.chunk_rows)
            log_p = _chunk_log_softmax(hidden[part], weight, bias, ctx.temperature)
            grad = _grad_logits(log_p, targets[part], entropy[part], grad_logp[part], grad_entropy[part])
            grad = (grad / ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.float().sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _grad_logits(log_p: Tensor, targets: Tensor, entropy: Tensor, grad_logp: Tensor, grad_entropy: Tensor) -> Tensor:
    p = torch.exp(log_p)
    centred = (log_p + entropy[:, None]).clamp(min=-math.log(torch.finfo(torch.float32).max))  # p * -inf would be NaN
    grad = -p * (grad_logp[:, None] + grad_entropy[:, None] * centred)
    grad.scatter_add_(1, targets[:, None], grad_logp[:, None])
    return grad
