"""A whole copy of the policy on every process, for the engine that rolls out.

The sharded weights themselves would do for a rollout: gather all layers, generate, let them go. But gathered
weights lie at another address after every update, which a captured CUDA graph cannot follow; their hooks run
for every layer of every token; and an update could not overlap the next rollout. A copy at a fixed place costs
one more model in compute precision (2 bytes a parameter) and one gather of the trained weights a step.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from luffy.distributed.shard import whole
from luffy.models.plain import take_same_path


class Replica:
    def __init__(self, model: nn.Module, device: str, *, holds: bool = True) -> None:
        """``model`` is still whole and of the precision it computes in: it is copied before it is sharded. A process
        that does not hold the copy still takes part when it is renewed."""
        self.holds = holds
        self._trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
        self.model: nn.Module = copy_of(model) if holds else nn.Module()
        nn.Module.to(self.model, device=torch.device(device))
        self.model.requires_grad_(False).eval()

    @torch.no_grad()
    def refresh(self, sharded: nn.Module) -> None:
        """Gather what is trained, one tensor at a time, on every process."""
        copies = dict(self.model.named_parameters())
        masters = dict(sharded.named_parameters())
        for name, dtype in self._trained.items():
            full = whole(masters[name].detach().to(dtype))  # fewer bytes travel than float32 masters have
            if self.holds:
                copies[name].copy_(full)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # another thread may read the copy on its own stream


class StaleReplica:
    """A copy of a replica, for a rollout that goes on with its weights while the replica gets new ones."""

    def __init__(self, model: nn.Module) -> None:
        self._source = model
        self.model = copy_of(model)

    @torch.no_grad()
    def catch_up(self) -> None:
        for mine, source in zip(self.model.parameters(), self._source.parameters(), strict=True):
            mine.copy_(source)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # before the source may change again


def copy_of(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    take_same_path(copied, model)
    return copied


def on_host(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's weights in host memory; tied weights stay one tensor."""
    copies: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in copies:
            copies[tensor.data_ptr()] = tensor.detach().to("cpu", copy=True)
        state[name] = copies[tensor.data_ptr()]
    return state
