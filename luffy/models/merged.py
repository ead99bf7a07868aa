"""One product for the linear layers that read the same input: queries, keys and values; gate and up.

Their weights are made rows of one block of memory, and the modules' parameters views of it: nothing exists twice, and
updates, checkpoints and pushes find every parameter where they always do. What gives a parameter a memory of its own
again (a copy of the model, a move to another device or dtype) takes it out of the block; `merge_weights` puts it back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luffy.models.separate import is_plain, separate

ALIGNMENT = 16  # bytes: where a parameter begins that other kernels read as fast as before

_one_at_a_time = threading.Lock()


@torch.no_grad()
def merge_weights(layers: Sequence[Any]) -> None:
    """Lay the weights of decoder ``layers`` side by side. Layers that are more than a plain product (adapters, hooks,
    sharded weights) stay as they are, and so does everything that lies right already."""
    with _one_at_a_time:
        apart = [parts for group in groups_of(layers) for parts in parts_of(group) if side_by_side(parts) is None]
        for parts in filter(_fit_together, apart):
            block = torch.cat(parts)
            for part, rows in zip(parts, block.split([len(part) for part in parts]), strict=True):
                part.data = rows
    if apart and apart[0][0].is_cuda:
        torch.cuda.empty_cache()  # the places they left are too small for the next block


def merged(x: Tensor, group: Sequence[Any]) -> tuple[Tensor, ...]:
    """What each linear layer of ``group`` makes of rows ``x``, as columns of one product where the weights lie side by
    side; without gradients."""
    if len(group) == 1 or not is_plain(group):
        return separate(x, group)
    blocks = [side_by_side(parts) for parts in parts_of(group)]
    if any(block is None for block in blocks):
        return separate(x, group)
    return F.linear(x, *blocks).split([linear.out_features for linear in group], dim=1)  # type: ignore[arg-type]


def merged_gates(x: Tensor, group: Sequence[Any]) -> Tensor | None:
    """silu(gate) * up by one kernel, for the linear layers of both; None where two are faster."""
    from luffy.kernels import gated

    if not (is_plain(group) and group[0].bias is None and gated.is_faster(x, group[0].out_features)):
        return None
    weight = side_by_side([linear.weight for linear in group])
    return None if weight is None else gated.gated_product(x, weight)


def groups_of(layers: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Linear layers that read the same rows, where they are plain ones."""
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            if is_plain(group):
                yield group


def parts_of(group: Sequence[Any]) -> list[list[Tensor]]:
    """Weights, and biases where there are any."""
    weights, biases = [linear.weight for linear in group], [linear.bias for linear in group]
    return [weights] if biases[0] is None else [weights, biases]


def _fit_together(parts: Sequence[Tensor]) -> bool:
    kinds = {(part.dtype, part.device) for part in parts}
    return len(kinds) == 1 and not any(part.numel() * part.itemsize % ALIGNMENT for part in parts)


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """``parts`` as one tensor without a copy, if each follows the one before in the same memory."""
    first = parts[0]
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        same_kind = part.dtype == first.dtype and part.stride() == first.stride() and part.shape[1:] == first.shape[1:]
        if part.data_ptr() != place or part.untyped_storage().data_ptr() != storage or not same_kind:
            return None
        place += part.numel() * part.itemsize
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
