"""flash-attn where it is installed: the newest of its packages that serves the GPU and agrees with torch.

torch brings the kernels of version 2 itself, so that package would change nothing. Versions 3 and 4 are written for
newer GPUs; both take the same arguments and align causality and windows to the end, as torch's own does. Version 4
compiles its kernels when they are first called and is still a beta, so nothing is taken on trust: a small forward and
backward pass must work and give torch's values, or torch's kernel serves. Windows are other kernels, tried apart.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

SWITCH = "LUFFY_FLASH_ATTN"  # 0: leave it alone though it is installed
# Module, and the generations of GPUs it has kernels for.
PACKAGES = (("flash_attn.cute", (9, 10, 11)), ("flash_attn_interface", (9,)))
TOLERANCE = 0.02  # of a tensor's norm; half precision itself is off by 0.003

logger = logging.getLogger(__name__)

# Query, key and value [tokens, heads, D], where the sequences of either begin, the longest of either, scale, window.
Varlen = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor], tuple[int, int], float, int | None], Tensor]


class Heads(NamedTuple):
    """What a kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    queries: int
    keys: int
    size: int
    windowed: bool = False  # by any number of tokens


def heads_of(query: Tensor, key: Tensor, window: int | None) -> Heads:
    return Heads(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2], window is not None)


@functools.cache
def flash_kernel(heads: Heads, trusted: Varlen) -> Varlen | None:
    """The first package that is there, serves this GPU and does what ``trusted`` does."""
    if os.environ.get(SWITCH) == "0":
        return None
    generation = gpu_generation(heads.device)
    for module in (name for name, generations in PACKAGES if generation in generations):
        try:
            kernel = _adapted(importlib.import_module(module).flash_attn_varlen_func)
        except (ImportError, AttributeError):
            continue
        trouble = disagreement(kernel, trusted, heads)
        if trouble is None:
            logger.info("attention runs on %s", module)
            return kernel
        warnings.warn(f"{module} is installed but not used, torch's own kernel serves: {trouble}", stacklevel=2)
    return None


def gpu_generation(device: torch.device) -> int:
    """The compute capability before the dot; 0 is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _adapted(package_function: Callable[..., Any]) -> Varlen:
    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        # Without a window nothing is said of it: versions 3 and 4 have different words for "unlimited".
        band = {} if window is None else {"window_size": (window - 1, 0)}
        out = package_function(
            query, key, value, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], max_seqlen_q=longest[0],
            max_seqlen_k=longest[1], softmax_scale=scale, causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(), **band,
        )  # fmt: skip
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return kernel


def disagreement(kernel: Varlen, trusted: Varlen, heads: Heads) -> str | None:
    """Why the kernel cannot stand in for the trusted one, or None."""
    try:
        ours, theirs = _aside(kernel, heads), _aside(trusted, heads)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever its compiler raises
        return f"{type(error).__name__}: {str(error)[:300]}"
    errors = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs}
    far = [f"{name} by {error:.2g}" for name, error in errors.items() if not error < TOLERANCE]
    return f"it differs from torch's in {', '.join(far)} of the norm" if far else None


def _aside(kernel: Varlen, heads: Heads) -> dict[str, Tensor]:
    """In a thread of its own: what the caller is in the middle of (inference, a layer that is being checkpointed and
    counts what is saved for its backward pass) is no business of the trial."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_tried, kernel, heads).result()


def _tried(kernel: Varlen, heads: Heads) -> dict[str, Tensor]:
    """Output and gradients of three sequences (whole, asked from the middle, of one token), on the CPU: the thread's
    stream is not the caller's."""
    asking, asked = (300, 129, 1), (300, 215, 1)
    window = 100 if heads.windowed else None
    generator = torch.Generator().manual_seed(0)
    shapes = ((asking, heads.queries), (asked, heads.keys), (asked, heads.keys))
    drawn = [torch.randn(sum(tokens), count, heads.size, generator=generator) for tokens, count in shapes]
    inputs = [x.to(heads.device, heads.dtype).requires_grad_() for x in drawn]
    bounds = tuple(torch.tensor((0, *n)).cumsum(0).to(heads.device, torch.int32) for n in (asking, asked))
    longest = (max(asking), max(asked))
    out = kernel(*inputs, bounds, longest, heads.size**-0.5, window)  # type: ignore[call-arg, arg-type]
    grads = torch.autograd.grad((out.float() * out.detach().float().sin()).sum(), inputs)
    return {name: x.detach().float().cpu() for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)}
