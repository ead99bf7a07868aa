"""Products of linear layers that read the same input: one by one, as one product, or with fewer kernels backward.

``separate``: as the modules compute them, and those with LoRA adapters in fewer kernels. An adapter's weights are
float32, so that no update of theirs is lost. peft multiplies by them in float32, which moves more memory than training
adapters alone saves. Here they are rounded to the precision of the weights, and their products are added to the layer's
own result. Gradients of adapters keep their own precision.

``summed``: the forward pass of the modules; backward, the products that make the parts of the input's gradient add
them up, and gradients of weights go straight into the float32 sums of the optimizer (`luffy.core.gradient_sums`).

``merged``: one product for queries, keys and values, and one for gate and up; without gradients. Their weights are rows
of one block of memory, and the modules' parameters views of it: nothing exists twice, and updates, checkpoints and
pushes find every parameter as before. A copy of the model, or a move to another device or dtype, takes parameters out
of the block; `merge_weights` puts them back.

``Fp8Products``: float8, without gradients. Embeddings, norms, attention and the vocabulary head stay in the model's
precision.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.core.gradient_sums import GradientSum, gradient_sum_of
from luffy.kernels import kernels_serve
from luffy.models.four_bit import FourBitLinear, unpacked

if TYPE_CHECKING:
    from luffy.kernels.quantize import Float8Rows

# Rows and linear layers that read them -> the result of each layer.
Products = Callable[[Tensor, Sequence[Any]], tuple[Tensor, ...]]

PEFT_LINEAR = "peft.tuners.lora.layer.Linear"  # by name: most runs do without peft
ALIGNMENT = 16  # bytes: a parameter that begins at a multiple of it is read as fast as before

MULTIPLE = 16  # rows and columns of a weight that the float8 product takes
FIRST_WITH_FP8 = (8, 9)  # compute capability: Ada, Hopper and later

_one_at_a_time = threading.Lock()


def separate(x: Tensor, group: Sequence[Any]) -> tuple[Tensor, ...]:
    """Result of each linear layer of ``group`` for rows ``x``."""
    adapters = [_adapter_of(linear) for linear in group]
    adapted = iter(_adapted(x, [adapter for adapter in adapters if adapter is not None]))
    return tuple(linear(x) if a is None else next(adapted) for linear, a in zip(group, adapters, strict=True))


def is_plain(group: Sequence[Any]) -> bool:
    """Whether the modules only multiply by parameters that are complete in this process."""
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
    """The one adapter of a layer whose own weight is frozen; None if it is more than two products."""
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
    takes = isinstance(base, FourBitLinear) or is_plain((base,))
    if drops or not (is_frozen and takes and is_plain((down, up))):
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
        outs = (F.linear(x, unpacked(base.weight), base.bias) for base in bases)
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
                through.addmm_(gradient, unpacked(base.weight))
        own = (g.to(w.dtype) for g, w in zip((*of_downs, *of_ups), weights, strict=True))
        return through, None, None, *own


def _rounded(weights: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """All down-projections as one matrix, and each up-projection times its scale."""
    downs, ups = list(weights[: len(scales)]), weights[len(scales) :]
    return torch.cat(downs).to(dtype), [(up * scale).to(dtype) for up, scale in zip(ups, scales, strict=True)]


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """left.T @ right of matrices of one dtype, in float32 without rounding on a GPU."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return (left.t() @ right).float()


def summed(x: Tensor, group: Sequence[Any]) -> tuple[Tensor, ...]:
    """Result of each linear layer of ``group`` for rows ``x``; by `separate` if a layer is more than a plain product or
    no optimizer keeps sums of its gradients."""
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


@torch.no_grad()
def merge_weights(layers: Sequence[Any]) -> None:
    """Lay the weights of decoder ``layers`` side by side, except layers that are more than a plain product (adapters,
    hooks, sharded weights)."""
    with _one_at_a_time:
        apart = [parts for group in groups_of(layers) for parts in parts_of(group) if side_by_side(parts) is None]
        for parts in filter(_fit_together, apart):
            block = torch.cat(parts)
            for part, rows in zip(parts, block.split([len(part) for part in parts]), strict=True):
                part.data = rows
    if apart and apart[0][0].is_cuda:
        torch.cuda.empty_cache()  # the places they left are too small for the next block


def merged(x: Tensor, group: Sequence[Any]) -> tuple[Tensor, ...]:
    """Result of each linear layer of ``group`` for rows ``x``, as columns of one product if the weights lie side by
    side; without gradients."""
    if len(group) == 1 or not is_plain(group):
        return separate(x, group)
    blocks = [side_by_side(parts) for parts in parts_of(group)]
    if any(block is None for block in blocks):
        return separate(x, group)
    return F.linear(x, *blocks).split([linear.out_features for linear in group], dim=1)  # type: ignore[arg-type]


def merged_gates(x: Tensor, group: Sequence[Any]) -> Tensor | None:
    """silu(gate) * up by one kernel, for the linear layers of both; None if two are faster."""
    from luffy.kernels import gated

    if not (is_plain(group) and group[0].bias is None and gated.is_faster(x, group[0].out_features)):
        return None
    weight = side_by_side([linear.weight for linear in group])
    return None if weight is None else gated.gated_product(x, weight)


def groups_of(layers: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Groups of plain linear layers that read the same rows."""
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            if is_plain(group):
                yield group


def parts_of(group: Sequence[Any]) -> list[list[Tensor]]:
    """Weights, then biases if there are any."""
    weights, biases = [linear.weight for linear in group], [linear.bias for linear in group]
    return [weights] if biases[0] is None else [weights, biases]


def _fit_together(parts: Sequence[Tensor]) -> bool:
    kinds = {(part.dtype, part.device) for part in parts}
    return len(kinds) == 1 and not any(part.numel() * part.itemsize % ALIGNMENT for part in parts)


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """``parts`` as one tensor without a copy, if each follows the one before in the same memory."""
    first = parts[0]
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        same_kind = part.dtype == first.dtype and part.stride() == first.stride() and part.shape[1:] == first.shape[1:]
        if part.data_ptr() != place or part.untyped_storage().data_ptr() != storage or not same_kind:
            return None
        place += part.numel() * part.itemsize
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def fp8_fault(layers: Sequence[Any]) -> str | None:
    """Reason why ``layers`` cannot run in float8 on their device, or None."""
    weight = next(layers[0].parameters())
    if not any(_quantizable(layers)):
        return (
            "the model has no plain linear layers that it could quantize (adapters, or sizes that 16 does not divide)"
        )
    if not weight.is_cuda:
        return None  # emulated, for tests
    if torch.cuda.get_device_capability(weight.device) < FIRST_WITH_FP8:
        return f"{torch.cuda.get_device_name(weight.device)} has no float8 products (Ada, Hopper and later have)"
    if weight.dtype != torch.bfloat16:
        return f"float8 products end in bfloat16 and the model is in {weight.dtype}: set model.dtype=bfloat16"
    return None


@dataclass(frozen=True)
class Quantized:
    """Quantized weights [out, in] of a group of linear layers, a scale for each row, and their biases; ``dtype`` of the
    original weights."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    dtype: torch.dtype = torch.bfloat16

    def product(self, x: Tensor | Float8Rows, may_cut: bool = False) -> Tensor:
        """[N, out]; with ``may_cut`` it may be several sums [parts, N, out] in float32."""
        from luffy.kernels.product import float8_product, tiling_for
        from luffy.kernels.quantize import Float8Rows, quantize_rows

        rows, scales = x = quantize_rows(x) if isinstance(x, Tensor) else x
        if not rows.is_cuda:
            return F.linear(
                rows.to(self.dtype) * scales[:, None], self.weight.to(self.dtype) * self.scales[:, None], self.bias
            )
        columns, depth = self.weight.shape
        hopper = torch.cuda.get_device_capability(rows.device)[0] == 9  # measured there alone
        tiling = tiling_for(len(rows), columns, depth, may_cut) if hopper else None
        if tiling is not None:
            return float8_product(x, Float8Rows(self.weight, self.scales), self.bias, self.dtype, tiling)
        return torch._scaled_mm(
            rows, self.weight.t(), scale_a=scales[:, None], scale_b=self.scales[None, :], bias=self.bias,
            out_dtype=self.dtype, use_fast_accum=True,
        )  # fmt: skip


class Fp8Products:
    """Products in float8: a quantized copy of the linear weights with a scale for each row, and inputs quantized row by
    row. Call `refresh` before the first product and after every update; it writes in place, so graphs see it."""

    def __init__(self) -> None:
        self._copies: dict[nn.Module, Quantized] = {}

    @torch.no_grad()
    def refresh(self, layers: Sequence[Any]) -> None:
        """Quantize the weights as they are now."""
        from luffy.kernels.quantize import Float8Rows, quantize_rows

        for group in _quantizable(layers):
            parts = [
                whole if (whole := side_by_side(each)) is not None else torch.cat(each) for each in parts_of(group)
            ]
            weight, bias = parts[0], parts[1] if len(parts) == 2 else None
            copy = self._copies.get(group[0])
            if copy is None or copy.weight.device != weight.device:
                out = Float8Rows.empty(weight.shape, weight.device)
                copy = self._copies[group[0]] = Quantized(*out, None if bias is None else bias.clone(), weight.dtype)
            quantize_rows(weight, Float8Rows(copy.weight, copy.scales))
            if copy.bias is not None and bias is not None:
                copy.bias.copy_(bias)

    def takes_float8(self, group: Sequence[Any]) -> bool:
        """Whether rows for these layers may come quantized."""
        return group[0] in self._copies

    def __call__(self, x: Tensor | Float8Rows, group: Sequence[Any]) -> tuple[Tensor, ...]:
        """A single layer's product may be several sums (`Quantized.product`), which the norm after it adds up."""
        copy = self._copies.get(group[0])
        if copy is None:
            assert isinstance(x, Tensor)  # see takes_float8
            return merged(x, group)
        if len(group) == 1:
            return (copy.product(x, may_cut=True),)
        return copy.product(x).split([linear.out_features for linear in group], dim=1)


def _quantizable(layers: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    for layer in layers:
        singles = [(layer.self_attn.o_proj,), (layer.mlp.down_proj,)]
        for group in (*groups_of([layer]), *filter(is_plain, singles)):
            rows, columns = sum(linear.out_features for linear in group), group[0].in_features
            if rows % MULTIPLE == 0 and columns % MULTIPLE == 0:
                yield group
