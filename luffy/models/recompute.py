"""A decoder layer computed again in the backward pass, all but its attention.

At 8,192 tokens attention is a fifth to a third of a layer's forward pass, and its result no larger than the layer's
input. So that is kept, and of the input one tensor instead of two: the memory is that of computing everything again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from luffy.models.attention import Layout

SWITCH = "LUFFY_KEEP_ATTENTION"  # 1: keep it
# flash-attn's own packages are not among them: their results are computed again.
KERNELS = (
    "torch_attn::_varlen_attn",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)

# The layer, what the layer before added to the stream, the stream, angles, layout, products -> the same two again.
Layer = Callable[..., tuple[Tensor, Tensor]]


def recomputed(
    layer: Layer, module: Any, delta: Tensor, residual: Tensor | None, angles: Any, layout: Layout, products: Any
) -> tuple[Tensor, Tensor]:
    """``layer`` of these, which keeps its inputs alone, or the sum of ``delta`` and ``residual`` and its attention's
    result."""
    if os.environ.get(SWITCH) != "1":
        return checkpoint(layer, module, delta, residual, angles, layout, products, use_reentrant=False)  # type: ignore[no-any-return]
    stream = delta if residual is None else delta + residual
    keeping = KeepingLayout(layout)
    return checkpoint(  # type: ignore[no-any-return]
        layer, module, stream, None, angles, keeping, products, use_reentrant=False, context_fn=keeping.contexts
    )


class KeepingLayout:
    """A layout whose attention runs in the forward pass alone. torch's selective checkpointing watches every operation
    of a layer, which costs the host more than a short layer takes; here it watches attention."""

    def __init__(self, layout: Layout) -> None:
        self.calls = 0
        self._layout = layout
        self._pass: AbstractContextManager[Any] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the forward pass and for the one that computes the layer again."""
        first, again = create_selective_checkpoint_contexts(_policy)
        return self._during(first), self._during(again)

    @contextmanager
    def _during(self, watching: AbstractContextManager[Any]) -> Iterator[None]:
        self._pass = watching
        yield

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        assert self._pass is not None
        with self._pass:
            return self._layout.attend(layer, query, key, value, scale, window)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = isinstance(operation, torch._ops.OpOverload) and operation.name() in KERNELS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
