"""AdamW with float32 master weights where the model is bfloat16, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from luffy.config import OptimConfig
from luffy.core.gradient_sums import GradientSum
from luffy.distributed.shard import whole
from luffy.errors import UserError


def lr_at(step: int, total_steps: int, cfg: OptimConfig) -> float:
    """The learning rate of training step ``step`` (from 0): linear warm-up, then the schedule."""
    warmup = cfg.warmup if cfg.warmup >= 1 else cfg.warmup * total_steps
    if step < warmup:
        return cfg.lr * (step + 1) / math.ceil(warmup)
    if cfg.schedule == "constant":
        return cfg.lr
    k = step - math.ceil(warmup) + 1  # counts the steps after the warm-up from 1
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    share = {
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "inverse_sqrt": 1 / math.sqrt(k),
        "inverse": 1 / k,
    }[cfg.schedule]
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share)


class Optimizer:
    """AdamW over the model's trainable parameters.

    A low-precision parameter gets a float32 master copy that holds its gradient and optimizer state;
    gradients of micro-batches add up there in float32 as soon as each backward pass makes them.
    """

    def __init__(self, model: nn.Module, cfg: OptimConfig, masters: dict[str, nn.Parameter] | None = None) -> None:
        """``masters``: those of another optimizer of the same model, which this one shares."""
        self.cfg = cfg
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = masters or {n: _master_of(p) for n, p in self.parameters.items()}
        decay = [m for n, m in self.masters.items() if self.parameters[n].ndim >= 2]
        plain = [m for n, m in self.masters.items() if self.parameters[n].ndim < 2]
        groups = [{"params": decay, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        on_cuda = any(p.is_cuda for p in self.parameters.values())
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=cfg.lr,
            betas=(cfg.betas[0], cfg.betas[1]),
            eps=cfg.eps,
            fused=on_cuda,
        )

    def gradients(self) -> list[Tensor]:
        return [m.grad for m in self.masters.values() if m.grad is not None]

    def grad_norm(self) -> Tensor:
        return whole(torch.nn.utils.get_total_norm(self.gradients()))

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor) -> None:
        if self.cfg.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.cfg.grad_clip, grad_norm)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    def zero_grad(self) -> None:
        for name, master in self.masters.items():
            master.grad = None
            self.parameters[name].grad = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything a resumed run needs, by name: moments, step counts, master weights."""
        for name, master in self.masters.items():
            for key, value in self.adam.state.get(master, {}).items():
                yield f"{name}/{key}", value.detach()
            if master is not self.parameters[name]:
                yield f"{name}/master", master.detach()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.adam.state.clear()
        for name, master in self.masters.items():
            keys = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"{name}/{k}" in tensors]
            if keys:
                self.adam.state[master] = {k: _like(tensors[f"{name}/{k}"], master, k) for k in keys}
            if f"{name}/master" in tensors:
                _check_shape(tensors[f"{name}/master"], master, "master")
                master.data.copy_(tensors[f"{name}/master"])
                self.parameters[name].data.copy_(master.data)


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float().clone())
    GradientSum.take_over(parameter, master)
    return master


def _like(tensor: Tensor, master: Tensor, key: str) -> Tensor:
    """A saved tensor where ``master`` is. Adam keeps its step count on the CPU unless it is fused."""
    _check_shape(tensor, master, key)
    return tensor.clone() if key == "step" and not master.is_cuda else tensor.to(master.device).clone()


def _check_shape(tensor: Tensor, master: Tensor, key: str) -> None:
    shape = torch.Size() if key == "step" else master.shape
    if tensor.shape != shape or not tensor.is_floating_point():
        raise UserError(
            f"the checkpoint's optimizer state ({key}) has the shape {tuple(tensor.shape)}, this model needs "
            f"{tuple(shape)}; start a new run with model.path= the checkpoint's model folder"
        )
