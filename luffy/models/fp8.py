"""Products in float8: a quantized copy of the layers' linear weights, a scale for each of their rows, and inputs
quantized row by row as they come. Embeddings, norms, attention and the vocabulary head stay in the model's precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.models.merged import groups_of, merged, parts_of, side_by_side
from luffy.models.separate import is_plain

if TYPE_CHECKING:
    from luffy.kernels.quantize import Float8Rows

MULTIPLE = 16  # rows and columns of a weight that the product takes
FIRST_WITH_FP8 = (8, 9)  # compute capability: Ada, Hopper and later


def fp8_fault(layers: Sequence[Any]) -> str | None:
    """Why ``layers`` cannot run in float8 where they are; None if they can."""
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
    """Weights [out, in] of a group of linear layers, with a scale for each row, their biases, and what they were
    quantized from."""

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
    """How linear layers are computed (`luffy.models.separate.Products`); `refresh` before the first product and after
    every update. The copies stay where they are, so graphs that read them see a refresh."""

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
