"""Linear layers that read the same input, with a backward pass of fewer kernels.

The gradient of the input is added up by the products that make its parts, and those of the weights go straight into
the float32 sums that an optimizer keeps (`luffy.core.gradient_sums`). The forward pass is that of the modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luffy.core.gradient_sums import GradientSum, gradient_sum_of
from luffy.kernels import kernels_serve
from luffy.models.separate import is_plain, separate


def summed(x: Tensor, group: Sequence[Any]) -> tuple[Tensor, ...]:
    """What each linear layer of ``group`` makes of rows ``x``. Where a layer is more than a plain product, or nobody
    keeps sums of its gradients, by `separate`."""
    trained = torch.is_grad_enabled() and is_plain(group)
    sums = [gradient_sum_of(layer.weight) if trained else None for layer in group]
    if not all(sums):
        return separate(x, group)
    biases = [layer.bias for layer in group if layer.bias is not None]
    out: tuple[Tensor, ...] = _Summed.apply(x, sums, *(layer.weight for layer in group), *biases)
    return out


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: list[GradientSum], *parameters: Tensor) -> tuple[Tensor, ...]:
        """``parameters``: as many weights as sums, then as many biases or none."""
        weights, biases = parameters[: len(sums)], parameters[len(sums) :]
        ctx.save_for_backward(x, *weights)
        ctx.sums, ctx.biased = sums, bool(biases)
        return tuple(map(F.linear, itertools.repeat(x), weights, biases or itertools.repeat(None)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        for gradient, total in zip(gradients, ctx.sums, strict=True):
            total.add_product(gradient, x)
        through = None
        if ctx.needs_input_grad[0]:
            through = gradients[0] @ weights[0]
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                through.addmm_(gradient, weight)
        of_biases = map(_bias_gradient, gradients) if ctx.biased else ()
        return through, None, *[None] * len(weights), *of_biases


def _bias_gradient(gradient: Tensor) -> Tensor:
    if kernels_serve(gradient.device):
        from luffy.kernels.sums import column_sums

        return column_sums(gradient, gradient.dtype)
    return gradient.sum(dim=0)
