"""Long packed sequences one by one through cuDNN's attention, which comes with torch and is written for Hopper.

torch's packed kernel is FlashAttention 2, which does not use what that GPU added. cuDNN's takes dense batches: each
sequence is padded to a round length, because cuDNN plans every new one in a third of a second. Padding lies to the
right, where causality hides it, or is a query whose result is never read; its gradients are zeros. Short sequences stay
packed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luffy.models.reach import Reach, Varlen

SWITCH = "LUFFY_CUDNN_ATTN"  # 0: leave it alone
GENERATIONS = (9,)  # of GPUs: where it was measured to be faster
STEP = 256
LONG = 8000  # tokens of a sequence from which a call of its own was measured to be faster; at 4,096 it was slower
MOST_WASTE = 1.25  # times the products that are needed


def pays(asking: int, asked: int) -> bool:
    """Whether the last ``asking`` tokens of a sequence of ``asked`` are worth a dense call over all of it."""
    needed = asked**2 - (asked - asking) ** 2
    return asked >= LONG and _rounded(asked) ** 2 <= MOST_WASTE * needed


def cudnn_kernel(others: Varlen, alone: Callable[[int, int], bool] = pays) -> Varlen:
    """Sequences that are to be computed ``alone`` one by one, ``others`` by the packed kernel."""
    return functools.partial(attend_dense, others=others, alone=alone)


def is_wanted(generation: int, size: int, windowed: bool, deterministic: bool) -> bool:
    """cuDNN has no windows here, heads of at most 128 numbers, and no backward pass that always gives the same bits."""
    left_alone = os.environ.get(SWITCH) == "0" or windowed or deterministic
    return generation in GENERATIONS and size <= 128 and not left_alone


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reach: Reach,
    scale: float,
    *,
    others: Varlen,
    alone: Callable[[int, int], bool],
) -> Tensor:
    asking, asked = reach.lengths
    dense = [alone(n, m) for n, m in zip(asking, asked, strict=True)]
    if not any(dense):
        return others(query, key, value, reach, scale)
    if len(dense) == 1:
        return _one(query, key, value, scale)
    queries, keys, values = query.split(asking), key.split(asked), value.split(asked)
    made = {i: _one(queries[i], keys[i], values[i], scale) for i, is_dense in enumerate(dense) if is_dense}
    if packed := tuple(i for i, is_dense in enumerate(dense) if not is_dense):
        part = reach.part(packed)
        q, k, v = (torch.cat([pieces[i] for i in packed]) for pieces in (queries, keys, values))
        made |= zip(packed, others(q, k, v, part, scale).split(part.lengths[0]), strict=True)
    return torch.cat([made[i] for i in range(len(dense))])


def _rounded(tokens: int) -> int:
    """Length rounded up to one of few: 33 up to 16,384 tokens, then 32 for every doubling."""
    step = max(STEP, 1 << max(tokens.bit_length() - 6, 0))
    return -(-tokens // step) * step


def _one(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The last len(query) tokens [n, H, D] of a sequence over all of it [m, KV, D]."""
    asking, asked = len(query), len(key)
    before, after = asked - asking, _rounded(asked) - asked
    padded = [_Pad.apply(x, b, after) for x, b in ((query, before), (key, 0), (value, 0))]  # type: ignore[no-untyped-call]
    q, k, v = (tokens.transpose(0, 1)[None] for tokens in padded)
    out: Tensor = _Cut.apply(_causal(q, k, v, scale).transpose(1, 2).squeeze(0), before, after)  # type: ignore[no-untyped-call]
    return out


def _padded(tokens: Tensor, before: int, after: int) -> Tensor:
    """[n, H, D] -> [before + n + after, H, D], with zeros; always a new tensor."""
    end = before + len(tokens)
    out = tokens.new_empty(end + after, *tokens.shape[1:])
    out[:before] = 0
    out[before:end] = tokens
    out[end:] = 0
    return out


class _Pad(torch.autograd.Function):
    """`F.pad`, whose gradient is a part of what comes and no copy."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, before: int, after: int) -> Tensor:
        ctx.part = slice(before, before + len(tokens))
        return _padded(tokens, before, after)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.part], None, None


class _Cut(torch.autograd.Function):
    """The way back. torch plans cuDNN's backward pass by the layout of queries, keys and values alone and uses the plan
    for every gradient that comes, so the gradient must always have the same layout: that of a new tensor."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, before: int, after: int) -> Tensor:
        ctx.around = before, after
        return padded[before : len(padded) - after]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _padded(gradient, *ctx.around), None, None


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """cuDNN is called by its name: choosing it as a backend would choose for all threads. On a CPU torch's own."""
    if not query.is_cuda:
        shares = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shares)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Sequence[Tensor] = attend(query, key, value, None, torch.is_grad_enabled(), 0.0, True, False, scale=scale)
    return out[0]
