"""AdamW with float32 master weights for a bfloat16 model, its state on the device or on the host; learning rates."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from luffy.config.knobs import OptimConfig
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


@dataclass
class HostState:
    """One weight's state, float32 in host memory; its gradient stays on the GPU."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: int = 0
    grad: Tensor | None = None

    @classmethod
    def of(cls, parameter: nn.Parameter) -> HostState:
        shape, pinned = parameter.shape, parameter.is_cuda
        master, exp_avg, exp_avg_sq = (_host_zeros(shape, pinned) for _ in range(3))
        state = cls(master, exp_avg, exp_avg_sq)
        state.master.copy_(parameter.detach())
        return state

    def tensors(self) -> list[Tensor]:
        return [self.master, self.exp_avg, self.exp_avg_sq]


def _host_zeros(shape: torch.Size, pinned: bool) -> Tensor:
    """Locked in place for fast copies. `pin_memory` would round sizes up to powers of two: up to twice the memory."""
    tensor = torch.zeros(shape, dtype=torch.float32)
    if pinned:
        cudart: Any = torch.cuda.cudart()
        address = tensor.data_ptr()
        failed = int(cudart.cudaHostRegister(address, tensor.numel() * tensor.itemsize, 0))
        if not failed:
            weakref.finalize(tensor, cudart.cudaHostUnregister, address)
        else:
            raise MemoryError(
                f"the host could not lock {tensor.numel() * tensor.itemsize / 2**30:.1f} GiB for optim.offload"
                f" (CUDA error {failed}): raise the limit of locked memory, or turn optim.offload off"
            )
    return tensor


class OffloadedOptimizer:
    """An `Optimizer` whose state lies in host memory and visits the GPU one weight at a time. Gradients stay on the
    GPU, in float32.

    Master weights and both moments are 12 bytes a weight: for 7B more than a GPU has left. While one weight is updated,
    the next one's state is on its way in and the last one's on its way out.
    """

    def __init__(self, model: nn.Module, cfg: OptimConfig) -> None:
        self.cfg = cfg
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.states = {n: HostState.of(p) for n, p in self.parameters.items()}
        self._on_gpu = any(p.is_cuda for p in self.parameters.values())
        self._streams = [torch.cuda.Stream() for _ in range(2)] if self._on_gpu else []
        for name, parameter in self.parameters.items():
            GradientSum.take_over(parameter, self.states[name])

    def gradients(self) -> list[Tensor]:
        return [s.grad for s in self.states.values() if s.grad is not None]

    def grad_norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm(self.gradients())

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor) -> None:
        limit = self.cfg.grad_clip
        scale = (limit / (grad_norm + 1e-6)).clamp(max=1.0) if limit > 0 else None
        names = [name for name, state in self.states.items() if state.grad is not None]
        arriving = self._fetch(names[0]) if names else []
        for i, name in enumerate(names):
            state, arriving = arriving, self._fetch(names[i + 1]) if i + 1 < len(names) else []
            self._wait_for(state)
            grad, self.states[name].grad = self.states[name].grad, None
            assert grad is not None
            self.states[name].steps += 1
            self._adam(name, state, grad if scale is None else grad.mul_(scale), lr)
            self._send_back(name, state)
        if self._on_gpu:
            for stream in (torch.cuda.current_stream(), *self._streams):  # not the device: see Stopwatch
                stream.synchronize()

    def _fetch(self, name: str) -> list[Tensor]:
        if not self._on_gpu:
            return self.states[name].tensors()
        with torch.cuda.stream(self._streams[0]):
            return [t.to(self.parameters[name].device, non_blocking=True) for t in self.states[name].tensors()]

    def _wait_for(self, state: list[Tensor]) -> None:
        """State was made on the stream that fetches; from here on the main one uses it."""
        if self._on_gpu:
            main = torch.cuda.current_stream()
            main.wait_stream(self._streams[0])
            for tensor in state:
                tensor.record_stream(main)

    def _send_back(self, name: str, state: list[Tensor]) -> None:
        if not self._on_gpu:
            return
        back = self._streams[1]
        back.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(back):
            for target, source in zip(self.states[name].tensors(), state, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(back)

    def _adam(self, name: str, state: list[Tensor], grad: Tensor, lr: float) -> None:
        master, exp_avg, exp_avg_sq = state
        cfg, t, parameter = self.cfg, self.states[name].steps, self.parameters[name]
        beta1, beta2 = cfg.betas
        if parameter.ndim >= 2:
            master.mul_(1 - lr * cfg.weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = exp_avg_sq.sqrt().div_((1 - beta2**t) ** 0.5).add_(cfg.eps)
        master.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**t))
        parameter.copy_(master)

    def zero_grad(self) -> None:
        for name, parameter in self.parameters.items():
            self.states[name].grad = parameter.grad = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The names of `Optimizer.tensors`: a run may resume with or without offloading."""
        for name, state in self.states.items():
            if state.steps:
                yield f"{name}/step", torch.tensor(float(state.steps))
                yield f"{name}/exp_avg", state.exp_avg
                yield f"{name}/exp_avg_sq", state.exp_avg_sq
            if self.parameters[name].dtype != torch.float32:
                yield f"{name}/master", state.master

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, state in self.states.items():
            parameter = self.parameters[name]
            state.master.copy_(tensors.get(f"{name}/master", parameter.detach()))
            parameter.data.copy_(state.master)
            for key, target in (("exp_avg", state.exp_avg), ("exp_avg_sq", state.exp_avg_sq)):
                target.copy_(tensors[f"{name}/{key}"]) if f"{name}/{key}" in tensors else target.zero_()
            state.steps = int(tensors.get(f"{name}/step", torch.tensor(0.0)))


AnyOptimizer = Optimizer | OffloadedOptimizer
