"""A weight's gradients added up over micro-batches in float32.

Autograd makes a gradient in the weight's own precision; adding it to a float32 sum reads both and writes one again.
Where the gradient is a product of two matrices, the product can add to the sum itself: nothing is rounded to half
precision, and the gradient never exists alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from luffy.kernels import kernels_serve


class HasGrad(Protocol):
    """Object with a gradient, such as a parameter."""

    grad: Tensor | None


@dataclass
class Holder:
    """Place for a gradient sum that no optimizer owns."""

    grad: Tensor | None


class GradientSum:
    """The sum, which lies in ``holder.grad``: None before the first gradient."""

    def __init__(self, holder: HasGrad) -> None:
        self._holder = holder

    @classmethod
    def take_over(cls, weight: nn.Parameter, holder: HasGrad) -> None:
        """From now on gradients of ``weight`` go to ``holder`` and leave ``weight.grad`` empty."""
        own = cls(holder)

        def take(weight: Tensor) -> None:
            if weight.grad is not None:  # what adds products itself leaves autograd nothing
                own.add(weight.grad)
                weight.grad = None

        weight.register_post_accumulate_grad_hook(take)
        weight.gradient_sum = own  # type: ignore[attr-defined]

    def add(self, gradient: Tensor) -> None:
        total = self._holder.grad
        if total is None:
            self._holder.grad = gradient.float()
        elif kernels_serve(total.device) and _is_flat(total) and _is_flat(gradient):
            from luffy.kernels.sums import add_

            add_(total, gradient)
        else:
            total.add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """left.T @ right, of matrices of one dtype."""
        total = self._holder.grad
        if not left.is_cuda or left.dtype == torch.float32:
            self.add(left.t() @ right)
        elif total is None:
            self._holder.grad = torch.mm(left.t(), right, out_dtype=torch.float32)
        else:
            torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)


def _is_flat(tensor: Tensor) -> bool:
    """Neither sharded nor with gaps."""
    return type(tensor) is Tensor and tensor.is_contiguous()


def gradient_sum_of(weight: Tensor | None) -> GradientSum | None:
    """Where a weight's gradients go, if some optimizer has taken them over."""
    return getattr(weight, "gradient_sum", None)
