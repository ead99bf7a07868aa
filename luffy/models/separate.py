"""Linear layers one by one, as their modules compute them, and those with LoRA adapters in fewer kernels.

An adapter's weights are float32, so that no update of theirs is lost. peft multiplies by them in float32: it casts the
input and adds, scales and casts results as large as the layer's own, which moves more memory than training adapters
alone saves. Here they are rounded to the precision of the weights beside them, as an optimizer rounds what it keeps in
float32, and the products themselves add to what the layer makes. Gradients of adapters leave in their own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Rows and linear layers that read them -> what each layer makes of them.
Products = Callable[[Tensor, Sequence[Any]], tuple[Tensor, ...]]

PEFT_LINEAR = "peft.tuners.lora.layer.Linear"  # by name: most runs do without peft


def separate(x: Tensor, group: Sequence[Any]) -> tuple[Tensor, ...]:
    """What each linear layer of ``group`` makes of rows ``x``."""
    adapters = [_adapter_of(linear) for linear in group]
    adapted = iter(_adapted(x, [adapter for adapter in adapters if adapter is not None]))
    return tuple(linear(x) if a is None else next(adapted) for linear, a in zip(group, adapters, strict=True))


def is_plain(group: Sequence[Any]) -> bool:
    """Whether calling the modules does nothing but multiply by parameters that lie whole in this process."""
    first = group[0]
    return all(
        type(linear) is nn.Linear
        and not (linear._forward_hooks or linear._forward_pre_hooks)
        and type(linear.weight) is nn.Parameter
        and (linear.bias is None) == (first.bias is None)
        for linear in group
    )


class Adapter(NamedTuple):
    """Adds ``scale * up @ down`` to the frozen weight of ``base``."""

    base: Any
    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    scale: float


def _adapter_of(linear: Any) -> Adapter | None:
    """The one adapter of a layer whose own weight is frozen; None where there is more to it than two products."""
    kind = type(linear)
    if f"{kind.__module__}.{kind.__name__}" != PEFT_LINEAR or linear.merged or linear.disable_adapters:
        return None
    names = [name for name in linear.active_adapters if name in linear.lora_A]
    if len(names) != 1 or names[0] in linear.lora_variant or linear._forward_hooks or linear._forward_pre_hooks:
        return None
    base, (name,) = linear.get_base_layer(), names
    down, up = linear.lora_A[name], linear.lora_B[name]
    is_frozen = not any(parameter.requires_grad for parameter in base.parameters())
    drops = not isinstance(linear.lora_dropout[name], nn.Identity)
    if drops or not (is_frozen and is_plain((base,)) and is_plain((down, up))):
        return None
    return Adapter(base, down.weight, up.weight, linear.scaling[name])


def _adapted(x: Tensor, adapters: Sequence[Adapter]) -> tuple[Tensor, ...]:
    if not adapters:
        return ()
    bases, downs, ups, scales = zip(*adapters, strict=True)
    out: tuple[Tensor, ...] = _Adapted.apply(x, bases, scales, *downs, *ups)
    return out


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bases: Sequence[nn.Linear], scales: Sequence[float], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """``weights``: as many going down as bases, then as many going up."""
        ctx.bases, ctx.scales = bases, scales
        down, ups = _rounded(weights, scales, x.dtype)
        inner = x @ down.t()  # of all adapters, side by side
        ctx.save_for_backward(x, inner, *weights)
        parts = inner.split([up.shape[1] for up in ups], dim=1)
        outs = (F.linear(x, base.weight, base.bias) for base in bases)
        return tuple(out.addmm_(part, up.t()) for out, part, up in zip(outs, parts, ups, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, inner, *weights = ctx.saved_tensors
        down, ups = _rounded(weights, ctx.scales, x.dtype)
        ranks = [up.shape[1] for up in ups]
        of_inner = torch.cat([gradient @ up for gradient, up in zip(gradients, ups, strict=True)], dim=1)
        of_downs = _float32_product(of_inner, x).split(ranks)
        of_ups = [
            _float32_product(gradient, part).mul_(scale)
            for gradient, part, scale in zip(gradients, inner.split(ranks, dim=1), ctx.scales, strict=True)
        ]
        through = None
        if ctx.needs_input_grad[0]:
            through = of_inner @ down
            for gradient, base in zip(gradients, ctx.bases, strict=True):
                through.addmm_(gradient, base.weight)
        own = (g.to(w.dtype) for g, w in zip((*of_downs, *of_ups), weights, strict=True))
        return through, None, None, *own


def _rounded(weights: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """What goes down as one matrix, and each that goes up with its scale."""
    downs, ups = list(weights[: len(scales)]), weights[len(scales) :]
    return torch.cat(downs).to(dtype), [(up * scale).to(dtype) for up, scale in zip(ups, scales, strict=True)]


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """left.T @ right, of matrices of one dtype, which a GPU does not round on the way."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return (left.t() @ right).float()
