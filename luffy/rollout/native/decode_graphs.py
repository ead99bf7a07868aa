"""Decoding steps on the device: state that never leaves it, and one CUDA graph per size of batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.kernels.draw import sample_and_advance
from luffy.models.forward import forward_hidden, head_weight_bias
from luffy.models.products import Products, separate
from luffy.rollout.native.paged_cache import PagedCache, PagedDecodeLayout

# Batches run with the next larger of these many rows; the idle ones write to the scratch page.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
LARGE_STEP = 128

_one_at_a_time = threading.Lock()


def bucket_for(rows: int, most: int) -> int:
    sizes = (*BUCKETS, -(-rows // LARGE_STEP) * LARGE_STEP)
    return min(next(size for size in sizes if size >= rows), most)


@dataclass(frozen=True)
class DecodeState:
    """State that a decoding step reads and updates, one row per live sequence."""

    tokens: Tensor  # [S] int64, the newest token
    positions: Tensor  # [S] int64, where it stands
    limits: Tensor  # [S] int64, the last position that may be written
    seeds: Tensor  # [S] int64
    temperatures: Tensor  # [S] float32
    greedy: Tensor  # [S] bool
    tables: Tensor  # [S, P] int32, the pages of the row
    rows: Tensor  # [S] int64, 0 to S - 1
    step: Tensor  # [1] int64, steps made of the burst
    drawn: Tensor  # [K, S] int64, tokens by step
    log_probs: Tensor  # [K, S] float32

    @classmethod
    def empty(cls, rows: int, pages: int, steps: int, device: torch.device) -> DecodeState:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            tokens=zeros(rows),
            positions=zeros(rows),
            limits=zeros(rows),
            seeds=zeros(rows),
            temperatures=torch.ones(rows, device=device),
            greedy=zeros(rows, dtype=torch.bool),
            tables=zeros(rows, pages, dtype=torch.int32),
            rows=torch.arange(rows, device=device),
            step=zeros(1),
            drawn=zeros(steps, rows),
            log_probs=zeros(steps, rows, dtype=torch.float32),
        )


class Decoder:
    """Runs decoding steps of the first rows of a state. On a GPU a step is one graph launch."""

    def __init__(
        self, model: nn.Module, cache: PagedCache, rows: int, pages: int, steps: int, products: Products = separate
    ) -> None:
        self._model, self._cache, self._products = model, cache, products
        self.state = DecodeState.empty(rows, pages, steps, cache.device)
        self._weights = weight_addresses(model)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None

    def is_current(self) -> bool:
        """Whether the weights still lie where the graphs read them."""
        return self._weights == weight_addresses(self._model)

    def run(self, rows: int) -> Tensor:
        """One step of the first ``rows`` rows (at least); returns their logits, valid until the next step."""
        bucket = bucket_for(rows, self.state.tables.shape[0])
        if self._pool is None:
            return self._step(self.state, bucket)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits

    def _step(self, state: DecodeState, rows: int) -> Tensor:
        layout = PagedDecodeLayout(self._cache, state.tables[:rows], state.rows[:rows], state.positions[:rows])
        hidden = forward_hidden(self._model, state.tokens[:rows], state.positions[:rows], layout, self._products)
        logits = F.linear(hidden, *head_weight_bias(self._model))
        sample_and_advance(
            logits, state.seeds, state.temperatures, state.greedy, state.tokens, state.positions, state.limits,
            state.step, state.drawn, state.log_probs,
        )  # fmt: skip
        return logits

    def _capture(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The first run, on a state of its own, compiles the kernels, which a capture must not do."""
        size, pages = self.state.tables.shape
        self._step(DecodeState.empty(size, pages, self.state.drawn.shape[0], self._cache.device), rows)
        with capturing(self._pool) as graph:
            logits = self._step(self.state, rows)
        return graph, logits


@contextmanager
def capturing(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the launches of the block as a graph. Torch captures on one stream for the whole process, so a second
    thread (prefetched rollouts, an evaluation) waits. A capture that fails leaves that stream the current one, where
    the next capture would record this thread's work; hence the reset."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with _one_at_a_time:
        torch.cuda.synchronize()
        try:
            # Another thread may be updating the policy meanwhile; only what this one does is captured and restricted.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                yield graph
        finally:
            torch.cuda.set_stream(stream)


def weight_addresses(model: nn.Module) -> tuple[int, ...]:
    """Addresses of the weights: graphs read them where they were at capture."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())
