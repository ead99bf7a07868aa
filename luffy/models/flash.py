"""flash-attn where it is installed: the newest of its packages that serves the GPU and agrees with torch.

torch brings the kernels of version 2 itself, so that package would change nothing. Versions 3 and 4 are written for
newer GPUs; both take the same arguments and align causality and windows to the end, as torch's own does. Version 4
compiles its kernels when they are first called and is still a beta, so nothing is taken on trust: a small forward and
backward pass must work and give torch's values, or torch's kernel serves. Windows are other kernels, tried apart.
Where there is none, cuDNN's kernel (`luffy.models.dense_attention`) is tried in the same way.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from luffy.models import dense_attention
from luffy.models.reach import Reach, Varlen

SWITCH = "LUFFY_FLASH_ATTN"  # 0: leave it alone though it is installed
# Module, and the generations of GPUs it has kernels for.
PACKAGES = (("flash_attn.cute", (9, 10, 11)), ("flash_attn_interface", (9,)))
TOLERANCE = 0.02  # of a tensor's norm; half precision itself is off by 0.003

logger = logging.getLogger(__name__)


class Heads(NamedTuple):
    """Properties for which a kernel is tried; each combination may mean another kernel."""

    device: torch.device
    dtype: torch.dtype
    queries: int
    keys: int
    size: int
    windowed: bool = False  # by any number of tokens
    deterministic: bool = False
    long: bool = False  # some sequence, enough for cuDNN


def heads_of(query: Tensor, key: Tensor, window: int | None, longest: int) -> Heads:
    """``longest``: tokens of the longest sequence."""
    exact, long = torch.are_deterministic_algorithms_enabled(), longest >= dense_attention.LONG
    return Heads(
        query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2], window is not None, exact, long
    )


@functools.cache
def flash_kernel(heads: Heads, trusted: Varlen) -> Varlen | None:
    """The first candidate that is there, serves this GPU and does what ``trusted`` does."""
    for name, find in _candidates(heads, trusted):
        try:
            kernel, tried = find()
            trouble = disagreement(tried, trusted, heads)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever its import or its compiler raises
            if isinstance(error, ModuleNotFoundError) and error.name in (name, name.split(".")[0]):
                continue  # not installed
            trouble = f"{type(error).__name__}: {str(error)[:300]}"
        if trouble is None:
            logger.info("attention runs on %s", name)
            return kernel
        warnings.warn(f"{name} is installed but not used, torch's own kernel serves: {trouble}", stacklevel=2)
    return None


def _candidates(heads: Heads, trusted: Varlen) -> Iterator[tuple[str, Callable[[], tuple[Varlen, Varlen]]]]:
    """Names of kernels with their loaders, which return the kernel and the form to try: cuDNN's also with short
    sequences."""
    generation = gpu_generation(heads.device)
    for module, generations in PACKAGES:
        if generation in generations and os.environ.get(SWITCH) != "0":
            yield module, partial(_from_package, module)
    if heads.long and dense_attention.is_wanted(generation, heads.size, heads.windowed, heads.deterministic):
        cudnn = dense_attention.cudnn_kernel
        yield "cuDNN's attention", lambda: (cudnn(trusted), cudnn(trusted, alone=lambda asking, asked: True))


def _from_package(module: str) -> tuple[Varlen, Varlen]:
    kernel = _adapted(importlib.import_module(module).flash_attn_varlen_func)
    return kernel, kernel


def gpu_generation(device: torch.device) -> int:
    """The compute capability before the dot; 0 is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _adapted(package_function: Callable[..., Any]) -> Varlen:
    def kernel(query: Tensor, key: Tensor, value: Tensor, reach: Reach, scale: float) -> Tensor:
        # Without a window nothing is said of it: versions 3 and 4 have different words for "unlimited".
        band = {} if reach.window is None else {"window_size": (reach.window - 1, 0)}
        out = package_function(
            query, key, value, cu_seqlens_q=reach.bounds[0], cu_seqlens_k=reach.bounds[1],
            max_seqlen_q=reach.longest[0], max_seqlen_k=reach.longest[1], softmax_scale=scale, causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(), **band,
        )  # fmt: skip
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return kernel


def disagreement(kernel: Varlen, trusted: Varlen, heads: Heads) -> str | None:
    """Why the kernel cannot stand in for the trusted one, or None."""
    ours, theirs = _aside(kernel, heads), _aside(trusted, heads)
    errors = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs}
    far = [f"{name} by {error:.2g}" for name, error in errors.items() if not error < TOLERANCE]
    return f"it differs from torch's in {', '.join(far)} of the norm" if far else None


def _aside(kernel: Varlen, heads: Heads) -> dict[str, Tensor]:
    """Try a kernel in another thread, so that the caller's state (inference mode, a layer being checkpointed) does not
    matter."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_tried, kernel, heads).result()


def _tried(kernel: Varlen, heads: Heads) -> dict[str, Tensor]:
    """Output and gradients of three sequences (whole, asked from the middle, of one token), and what other kernels may
    serve: no gradient, short sequences. On the CPU, since the thread's stream is not the caller's."""
    on_its_gpu = torch.cuda.device(heads.device) if heads.device.type == "cuda" else nullcontext()
    with on_its_gpu:  # which GPU is the current one belongs to the thread, and a new one begins with the first
        inputs, ask = _question(heads, (300, 129, 1), (300, 215, 1))
        out = ask(kernel)
        grads = torch.autograd.grad((out.float() * out.detach().float().sin()).sum(), inputs)
        with torch.no_grad():
            scored = ask(kernel)
            short = _question(heads, (17, 3), (17, 5))[1](kernel)
        found = {"out": out, "dq": grads[0], "dk": grads[1], "dv": grads[2], "scored": scored, "short": short}
        return {name: x.detach().float().cpu() for name, x in found.items()}


def _question(
    heads: Heads, asking: tuple[int, ...], asked: tuple[int, ...]
) -> tuple[list[Tensor], Callable[[Varlen], Tensor]]:
    """Random queries, keys and values, and what asks a kernel about them."""
    generator = torch.Generator().manual_seed(0)

    def random(lengths: tuple[int, ...], count: int) -> Tensor:
        drawn = torch.randn(sum(lengths), count, heads.size, generator=generator)
        return drawn.to(heads.device, heads.dtype).requires_grad_()

    query, key, value = random(asking, heads.queries), random(asked, heads.keys), random(asked, heads.keys)
    window = max(asked) // 3 if heads.windowed else None
    reach = Reach.of(asking, asked, window, heads.device)
    return [query, key, value], lambda kernel: kernel(query, key, value, reach, heads.size**-0.5)
