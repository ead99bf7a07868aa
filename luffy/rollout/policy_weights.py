"""The policy's weights as another engine takes them: under the names of its checkpoint, adapters merged in.

vLLM takes a push as it comes. Missing names are passed over in silence, a wrong shape breaks it for good, and NaN
stays in its KV cache after good weights are back. So a push is checked as a whole before its first tensor leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from luffy.errors import UserError
from luffy.models.forward import causal_lm
from luffy.models.four_bit import matrix_kind, unpacked

NAMED = 3  # names that an error lists


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of the checkpoint. ``layer`` is the PEFT layer whose adapters still have to be added to it."""

    name: str
    base: Tensor
    layer: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return matrix_kind(self.base)[0]

    @property
    def dtype(self) -> torch.dtype:
        return matrix_kind(self.base)[1]

    @torch.no_grad()
    def tensor(self) -> Tensor:
        value = unpacked(self.base).detach()
        if self.layer is None:
            return value
        deltas = [self.layer.get_delta_weight(adapter) for adapter in self.layer.active_adapters]
        return (value.float() + sum(delta.detach().float() for delta in deltas)).to(value.dtype)


def checkpoint_weights(model: nn.Module) -> list[Weight]:
    """Weights that ``save_pretrained`` of the merged model would write, tied ones once; nothing is computed yet."""
    causal = causal_lm(model)
    adapted = {name: module for name, module in causal.named_modules() if hasattr(module, "get_delta_weight")}
    weights = []
    for name, parameter in causal.named_parameters():
        owner, _, field = name.rpartition(".")
        layer = owner.removesuffix(".base_layer")
        if layer in adapted and layer != owner:
            weights.append(Weight(f"{layer}.{field}", parameter, adapted[layer] if field == "weight" else None))
        elif not any(owner.startswith(f"{inside}.") for inside in adapted):
            weights.append(Weight(name, parameter))
    return weights


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor), one at a time: merged adapters never exist for more than one layer."""
    return ((weight.name, weight.tensor()) for weight in checkpoint_weights(model))


class PushCheck:
    """Compares a push with the names and shapes of the model's config."""

    def __init__(self, model: nn.Module) -> None:
        causal = causal_lm(model)
        with torch.device("meta"):
            blank = type(causal)(causal.config)
        blank.tie_weights()
        self.shapes = {name: tuple(parameter.shape) for name, parameter in blank.named_parameters()}

    def __call__(self, model: nn.Module, version: int) -> None:
        """Raise before any tensor is pushed if the weights are wrong."""
        found = {weight.name: weight.shape for weight in checkpoint_weights(model)}
        self._names(version, missing=self.shapes.keys() - found.keys(), unknown=found.keys() - self.shapes.keys())
        wrong = [name for name, shape in found.items() if shape != self.shapes[name]]
        if wrong:
            raise UserError(
                f"weights of version {version} not pushed: {_some(wrong)} of the wrong shape, "
                f"{wrong[0]} is {list(found[wrong[0]])} and must be {list(self.shapes[wrong[0]])}"
            )
        broken = not_finite(model)
        if broken:
            raise FloatingPointError(f"weights of version {version} not pushed: {_some(broken)} with NaN or infinity")

    def _names(self, version: int, missing: set[str], unknown: set[str]) -> None:
        for names, what in ((missing, "missing"), (unknown, "unknown to the model's config")):
            if names:
                raise UserError(f"weights of version {version} not pushed: {_some(sorted(names))} {what}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown})"


def not_finite(model: nn.Module) -> list[str]:
    """Parameters with NaN or infinity, for the price of one transfer from the device."""
    named = list(causal_lm(model).named_parameters())
    with torch.no_grad():
        finite = torch.stack([torch.isfinite(parameter).all() for _, parameter in named]).tolist()
    return [name for (name, _), good in zip(named, finite, strict=True) if not good]
