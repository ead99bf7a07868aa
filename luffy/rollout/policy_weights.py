"""The policy's weights as another engine takes them: under the names of its checkpoint, adapters merged in or alone.

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
TAKES_ADAPTERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # in every model of vLLM


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
    causal, adapted, weights = causal_lm(model), adapted_layers(model), []
    for name, parameter in causal.named_parameters():
        owner, _, field = name.rpartition(".")
        around = []  # several where PEFT adapts several parameters of a module
        while owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            around += [adapted[owner]] if owner in adapted else []
        if around:
            layer = next((one for one in around if getattr(one, "parameter_name", "weight") == field), None)
            weights.append(Weight(f"{owner}.{field}", parameter, layer))
        elif not any(owner.startswith(f"{inside}.") for inside in adapted):
            weights.append(Weight(name, parameter))
    return weights


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """PEFT's layers by the name of the layer that each stands for."""
    return {name: module for name, module in causal_lm(model).named_modules() if hasattr(module, "get_delta_weight")}


def tensors_of(model: nn.Module, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor), one at a time: merged adapters never exist for more than one layer. Without ``merged`` adapters
    are left out."""
    return ((w.name, w.tensor() if merged else unpacked(w.base).detach()) for w in checkpoint_weights(model))


@torch.no_grad()
def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Adapters alone under PEFT's names, in the dtype in which the policy computes with them (luffy.models.products).
    ``lora_B`` is multiplied by alpha / rank already."""
    tensors = {}
    for name, layer in adapted_layers(model).items():
        (adapter,) = layer.active_adapters
        (_, dtype), place = matrix_kind(layer.get_base_layer().weight), f"base_model.model.{name}"
        tensors[f"{place}.lora_A.weight"] = layer.lora_A[adapter].weight.to(dtype)
        tensors[f"{place}.lora_B.weight"] = (layer.lora_B[adapter].weight * layer.scaling[adapter]).to(dtype)
    return tensors


def check_adapters_alone(model: nn.Module) -> None:
    """Raise a UserError if vLLM could not compute with these adapters beside its weights."""
    others = [name for name in adapted_layers(model) if name.rpartition(".")[2] not in TAKES_ADAPTERS]
    if others:
        raise UserError(
            f"vLLM takes no adapters of {others[0]}: leave it out of model.lora.target_modules, or set "
            "rollout.vllm.adapters=merged"
        )


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
