"""flash-attn where it is installed: the newest of its packages that serves the GPU and agrees with torch.

torch brings the kernels of version 2 itself, so that package would change nothing. Versions 3 and 4 are written for
newer GPUs; both take the same arguments and align causality and windows to the end, as torch's own does. Version 4
compiles its kernels when they are first called and is still a beta, so nothing is taken on trust: a small forward and
backward pass must work and give torch's values, or torch's kernel serves. Windows are other kernels, tried apart.
Where there is none, cuDNN's kernel is tried in the same way; ``attend_dense`` runs it, a sequence at a time.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from luffy.types import to_device

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Reach:
    """Stretches of queries over sequences of keys, both end to end; causality and window are aligned to the ends."""

    bounds: tuple[Tensor, Tensor]  # where each begins, and where the last one ends: of queries, of keys
    lengths: tuple[Lengths, Lengths]  # the same on the host
    window: int | None  # tokens that a query sees, its own included
    _parts: dict[Lengths, Reach] = field(default_factory=dict)

    @staticmethod
    def of(asking: Lengths, asked: Lengths, window: int | None, device: torch.device) -> Reach:
        return Reach((bounds_of(asking, device), bounds_of(asked, device)), (asking, asked), window)

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.lengths[0]), max(self.lengths[1])

    def part(self, members: Lengths) -> Reach:
        """Reach of the chosen sequences, laid end to end."""
        if members not in self._parts:
            asking, asked = (tuple(lengths[i] for i in members) for lengths in self.lengths)
            self._parts[members] = Reach.of(asking, asked, self.window, self.bounds[0].device)
        return self._parts[members]


def bounds_of(lengths: Lengths, device: torch.device) -> Tensor:
    """[S + 1] int32: where each sequence starts, and where the last one ends."""
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return to_device(ends, device)


# Query, key and value [tokens, heads, D], who sees whom, scale.
Varlen = Callable[[Tensor, Tensor, Tensor, Reach, float], Tensor]


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
    exact, long = torch.are_deterministic_algorithms_enabled(), longest >= LONG
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
    if heads.long and is_wanted(generation, heads.size, heads.windowed, heads.deterministic):
        yield "cuDNN's attention", lambda: (cudnn_kernel(trusted), cudnn_kernel(trusted, alone=lambda *lengths: True))


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


# ---- long packed sequences one by one through cuDNN's attention, which comes with torch and is written for Hopper
#
# torch's packed kernel is FlashAttention 2, which does not use what that GPU added. cuDNN's takes dense batches: each
# sequence is padded to a round length, because cuDNN plans every new one in a third of a second. Padding lies to the
# right, where causality hides it, or is a query whose result is never read; its gradients are zeros. Short sequences
# stay packed.

CUDNN_SWITCH = "LUFFY_CUDNN_ATTN"  # 0: leave it alone
GENERATIONS = (9,)  # of GPUs: where it was measured to be faster
STEP = 256
LONG = 8000  # tokens of a sequence from which a call of its own was measured to be faster; at 4,096 it was slower
MOST_WASTE = 1.25  # times the products that are needed


def pays(asking: int, asked: int) -> bool:
    """Whether the last ``asking`` tokens of a sequence of ``asked`` are worth a dense call over all of it."""
    needed = asked**2 - (asked - asking) ** 2
    return asked >= LONG and _rounded(asked) ** 2 <= MOST_WASTE * needed


def cudnn_kernel(others: Varlen, alone: Callable[[int, int], bool] = pays) -> Varlen:
    """Sequences that are to be computed ``alone`` one by one, ``others`` by the packed kernel."""
    return functools.partial(attend_dense, others=others, alone=alone)


def is_wanted(generation: int, size: int, windowed: bool, deterministic: bool) -> bool:
    """cuDNN has no windows here, heads of at most 128 numbers, and no backward pass that always gives the same bits."""
    left_alone = os.environ.get(CUDNN_SWITCH) == "0" or windowed or deterministic
    return generation in GENERATIONS and size <= 128 and not left_alone


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reach: Reach,
    scale: float,
    *,
    others: Varlen,
    alone: Callable[[int, int], bool],
) -> Tensor:
    asking, asked = reach.lengths
    dense = [alone(n, m) for n, m in zip(asking, asked, strict=True)]
    if not any(dense):
        return others(query, key, value, reach, scale)
    if len(dense) == 1:
        return _one(query, key, value, scale)
    queries, keys, values = query.split(asking), key.split(asked), value.split(asked)
    made = {i: _one(queries[i], keys[i], values[i], scale) for i, is_dense in enumerate(dense) if is_dense}
    if packed := tuple(i for i, is_dense in enumerate(dense) if not is_dense):
        part = reach.part(packed)
        q, k, v = (torch.cat([pieces[i] for i in packed]) for pieces in (queries, keys, values))
        made |= zip(packed, others(q, k, v, part, scale).split(part.lengths[0]), strict=True)
    return torch.cat([made[i] for i in range(len(dense))])


def _rounded(tokens: int) -> int:
    """Length rounded up to one of few: 33 up to 16,384 tokens, then 32 for every doubling."""
    step = max(STEP, 1 << max(tokens.bit_length() - 6, 0))
    return -(-tokens // step) * step


def _one(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The last len(query) tokens [n, H, D] of a sequence over all of it [m, KV, D]."""
    asking, asked = len(query), len(key)
    before, after = asked - asking, _rounded(asked) - asked
    padded = [_Pad.apply(x, b, after) for x, b in ((query, before), (key, 0), (value, 0))]  # type: ignore[no-untyped-call]
    q, k, v = (tokens.transpose(0, 1)[None] for tokens in padded)
    out: Tensor = _Cut.apply(_causal(q, k, v, scale).transpose(1, 2).squeeze(0), before, after)  # type: ignore[no-untyped-call]
    return out


def _padded(tokens: Tensor, before: int, after: int) -> Tensor:
    """[n, H, D] -> [before + n + after, H, D], with zeros; always a new tensor."""
    end = before + len(tokens)
    out = tokens.new_empty(end + after, *tokens.shape[1:])
    out[:before] = 0
    out[before:end] = tokens
    out[end:] = 0
    return out


class _Pad(torch.autograd.Function):
    """`F.pad`, whose gradient is a part of what comes and no copy."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, before: int, after: int) -> Tensor:
        ctx.part = slice(before, before + len(tokens))
        return _padded(tokens, before, after)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.part], None, None


class _Cut(torch.autograd.Function):
    """The way back. torch plans cuDNN's backward pass by the layout of queries, keys and values alone and uses the plan
    for every gradient that comes, so the gradient must always have the same layout: that of a new tensor."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, before: int, after: int) -> Tensor:
        ctx.around = before, after
        return padded[before : len(padded) - after]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _padded(gradient, *ctx.around), None, None


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """cuDNN is called by its name: choosing it as a backend would choose for all threads. On a CPU torch's own."""
    if not query.is_cuda:
        shares = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shares)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Sequence[Tensor] = attend(query, key, value, None, torch.is_grad_enabled(), 0.0, True, False, scale=scale)
    return out[0]
