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
from luffy.rollout.native.paged_cache import SCRATCH, PagedCache, PagedDecodeLayout
from luffy.types import to_device

# Batches run with the next larger of these many rows; the idle ones write to the scratch page.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
LARGE_STEP = 128
VERIFIED_ROWS = (4, 16, 32, 64, 128)  # the same, for passes over drafts, of at most VERIFIED_TOKENS tokens

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
        self.model, self.cache, self.products = model, cache, products
        self.state = DecodeState.empty(rows, pages, steps, cache.device)
        self._weights = weight_addresses(model)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None

    def is_current(self) -> bool:
        """Whether the weights still lie where the graphs read them."""
        return self._weights == weight_addresses(self.model)

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
        layout = PagedDecodeLayout(self.cache, state.tables[:rows], state.rows[:rows], state.positions[:rows])
        hidden = forward_hidden(self.model, state.tokens[:rows], state.positions[:rows], layout, self.products)
        logits = F.linear(hidden, *head_weight_bias(self.model))
        sample_and_advance(
            logits, state.seeds, state.temperatures, state.greedy, state.tokens, state.positions, state.limits,
            state.step, state.drawn, state.log_probs,
        )  # fmt: skip
        return logits

    def _capture(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The first run, on a state of its own, compiles the kernels, which a capture must not do."""
        size, pages = self.state.tables.shape
        self._step(DecodeState.empty(size, pages, self.state.drawn.shape[0], self.cache.device), rows)
        with capturing(self._pool) as graph:
            logits = self._step(self.state, rows)
        return graph, logits


class Verifier:
    """Passes over several tokens of each row of a decoder: the newest one and those drafted behind it. On a GPU a pass
    is one graph launch; of each number of tokens there are few graphs."""

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        self._decoder, state = decoder, decoder.state
        # By row the position of the first token to feed, and the tokens.
        self._fed = torch.zeros(len(state.limits), tokens + 1, dtype=torch.int64, device=state.limits.device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._fed.is_cuda else None

    def run(self, fed: Tensor) -> tuple[Tensor, Tensor]:
        """Feed the first rows tokens: ``fed`` [B, 1 + K] on the host, the position of the first and the tokens. Returns
        [2, rows, K] float64, the token drawn behind each of them and its log-prob, and the logits [rows * K, V]; both
        valid until the next pass."""
        rows, count = len(fed), fed.shape[1] - 1
        self._fed[:rows, : 1 + count] = to_device(fed, self._fed.device)
        self._fed[rows:].zero_()  # idle rows write to the scratch page
        most = len(self._fed)
        size = min(next((size for size in VERIFIED_ROWS if size >= rows), most), most)
        if self._pool is None:
            return self._pass(size, count)
        if (size, count) not in self._graphs:
            self._pass(size, count)  # compiles the kernels, which a capture must not do
            with capturing(self._pool) as graph:
                made = self._pass(size, count)
            self._graphs[size, count] = (graph, made)
        graph, made = self._graphs[size, count]
        graph.replay()
        return made

    def _pass(self, rows: int, count: int) -> tuple[Tensor, Tensor]:
        decoder, state = self._decoder, self._decoder.state

        def of_each(row: Tensor) -> Tensor:
            return row[:rows, None].expand(-1, count).flatten().contiguous()

        along = self._fed[:rows, :1] + torch.arange(count, device=self._fed.device)
        limits, tables = state.limits[:rows, None], state.tables[:rows]
        # What is drawn behind a limit is dropped, and must overwrite nothing.
        places = tables[:, None].expand(-1, count, -1).masked_fill((along > limits)[..., None], SCRATCH).flatten(0, 1)
        positions = along.minimum(limits).flatten()
        tokens = self._fed[:rows, 1 : 1 + count].flatten().clone()  # the draw overwrites them; a row alone is a view
        numbers = torch.arange(len(tokens), device=tokens.device)
        layout = PagedDecodeLayout(decoder.cache, tables, numbers, positions, places=places)
        hidden = forward_hidden(decoder.model, tokens, positions, layout, decoder.products)
        logits = F.linear(hidden, *head_weight_bias(decoder.model))
        drawn, log_probs = torch.empty_like(tokens)[None], torch.empty_like(tokens, dtype=torch.float32)[None]
        sample_and_advance(
            logits, of_each(state.seeds), of_each(state.temperatures), of_each(state.greedy), tokens, positions,
            of_each(state.limits), torch.zeros_like(state.step), drawn, log_probs,
        )  # fmt: skip
        return torch.stack((drawn[0].double(), log_probs[0].double())).view(2, rows, count), logits


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
