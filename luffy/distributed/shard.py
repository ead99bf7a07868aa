"""FSDP2: weights, gradients and optimizer state spread over the processes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from luffy.config.knobs import ParallelConfig
from luffy.errors import ConfigError
from luffy.models.load import DTYPES, DtypeName


def build_mesh(cfg: ParallelConfig, device: str) -> DeviceMesh:
    """One dimension to shard over; hybrid: groups of ``shard_size`` ranks that hold the same shards."""
    size = dist.get_world_size()
    if cfg.shard == "full":
        return init_device_mesh(device, (size,), mesh_dim_names=("shard",))
    group = cfg.shard_size or local_world_size()
    if size % group:
        raise ConfigError(
            f"'parallel.shard_size' ({group}) does not divide the {size} processes; set it to a divisor, "
            f"best the number of GPUs of a machine"
        )
    return init_device_mesh(device, (size // group, group), mesh_dim_names=("replicate", "shard"))


def local_world_size() -> int:
    """Processes of this machine, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def shard(root: nn.Module, cfg: ParallelConfig, dtype: DtypeName, device: str) -> None:
    """Shard ``root`` in place: one unit per decoder layer, and one for embeddings, last norm and head.

    The weights become float32 masters, a unit at a time; layers compute in ``dtype``, gradients are reduced in
    float32. Only a call of ``root`` itself gathers the last unit, so whatever reads the head's weight must run
    inside that call. What ``root`` returns are copies: see `copies`.
    """
    compute = DTYPES[dtype]
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if cfg.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": build_mesh(cfg, device),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "offload_policy": offload,
    }
    for unit in [*decoder_layers(root), root]:
        become_masters(unit)
        fully_shard(unit, **options)
    for module in units(root):
        # Loss weights hold the denominator of the whole mini-batch already: gradients add, never average.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    root.register_forward_hook(lambda module, args, outputs: copies(outputs))  # after the hooks of FSDP2


def units(root: nn.Module) -> list[FSDPModule]:
    """The modules whose weights are gathered together; none if ``root`` is not sharded."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def copies(outputs: Any) -> Any:
    """Copies of the tensors in ``outputs`` that a caller may differentiate with respect to.

    FSDP2 takes a gradient that reaches a tensor its root returned for the start of a backward pass. It gathers the
    last layer ahead and frees the root, whose second gather may then get the memory that the first is still writing
    to: the gradients are wrong, without an error. A gradient that ends at a copy does not reach the tensor.
    """
    return tree_map_only(Tensor, Tensor.clone, outputs)


def let_go_of_gathered(root: nn.Module) -> None:
    """Free the weights that a pass without gradients left gathered (the embeddings and the head stay for the backward
    pass that usually follows), so that the next pass gathers those of then."""
    for module in units(root):
        module.reshard()


def keep_gathered(root: nn.Module, keep: bool) -> None:
    """Whether the passes to come leave the weights gathered and sum gradients, unreduced, on each process. Call it with
    False before the last of these passes: that one reduces the sums and frees the weights. All processes must agree,
    because it decides which pass communicates."""
    for module in units(root):
        module.set_reshard_after_forward(not keep and module is not root, recurse=False)
        module.set_reshard_after_backward(not keep, recurse=False)
        module.set_requires_gradient_sync(not keep, recurse=False)


def gathered_bytes(root: nn.Module, dtype: DtypeName, *, gradients: bool) -> int:
    """Memory of all weights in ``dtype`` and, on request, of all their gradients in float32: what a process holds of a
    model whose units all stay gathered."""
    parameters = list(root.parameters())
    weights = sum(p.numel() for p in parameters) * DTYPES[dtype].itemsize
    return weights + gradients * sum(p.numel() for p in parameters if p.requires_grad) * torch.float32.itemsize


def become_masters(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


def decoder_layers(root: nn.Module) -> list[nn.Module]:
    """The repeated blocks, by the class names that transformers itself keeps whole."""
    causal = next((m for m in root.modules() if getattr(m, "_no_split_modules", None)), None)
    names = set(getattr(causal, "_no_split_modules", None) or ())
    layers = [module for module in root.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError("the model does not say what its layers are, so it cannot be sharded; set launch=local")
    return layers


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one (all processes must ask); a plain one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
