"""Rounds of decoding with overrides on a GPU: one CUDA graph per size of batch, kept between calls.

    rows of the batch --copied to fixed places--> graph of `Round` --fixed places--> proposals

The rule's verification of the proposals is not captured: its parameters change from step to step, and its few
kernels are queued while the graph still runs. The caches are released after every call; graphs read their addresses
from memory.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from luffy.errors import UserError
from luffy.kernels.draw import draw_tokens
from luffy.models.forward import causal_lm, head_weight_bias, text_config
from luffy.rollout.native.decode_graphs import bucket_for, capturing, weight_addresses
from luffy.rollout.native.paged_cache import PagedSlots, cache_shape, pages_for
from luffy.rollout.native.paged_generation import affordable
from luffy.rollout.overrides.propose import Proposals, Round, RoundRows

# Log-probs of a round that exist at once, counted in float32 [k, V] a row: fixed places, graphs, verification.
ROUND_COPIES = 10


def slots_available(wanted: int, models: tuple[nn.Module, nn.Module], capacity: int, k: int, share: float) -> int:
    """Number of slots, at most ``wanted``, for which a share of the unused memory holds all that a round needs."""
    keys = sum(cache_shape(model).page_bytes * pages_for(capacity) for model in models)
    scores = ROUND_COPIES * k * text_config(causal_lm(models[0]).config).vocab_size * torch.float32.itemsize
    slots = affordable(wanted, keys + scores, head_weight_bias(models[0])[0].device, share)
    if slots < 1:
        raise UserError(
            "no memory is left for one sequence with overrides: use a smaller model, LoRA or lower rollout.max_tokens"
        )
    return slots


class RoundGraphs:
    """Runs rounds of up to ``rows`` sequences with k proposals each."""

    def __init__(self, draft: nn.Module, second: nn.Module, rows: int, k: int, max_context: int) -> None:
        self._models, self._rows, self._k = (draft, second), rows, k
        device = head_weight_bias(draft)[0].device
        self.caches = [PagedSlots(cache_shape(model), device, rows, max_context + k) for model in self._models]
        self.round = Round(draft, second, self.caches, max_context, draw_tokens)
        self._weights = [weight_addresses(model) for model in self._models]
        tokens, positions, seeds = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._input = RoundRows(tokens, positions, seeds, torch.ones(rows, 1, device=device))
        self._output = self._places(rows, k, device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def _places(self, rows: int, k: int, device: torch.device) -> Proposals:
        shape = (rows, k, self.round.vocabulary)
        second, _ = head_weight_bias(self._models[1])
        return Proposals(
            torch.zeros(rows, k, dtype=torch.int64, device=device),
            torch.empty(shape, device=device),
            torch.empty(shape, dtype=second.dtype, device=device),
        )

    def serves(self, slots: int, k: int) -> bool:
        """Whether there are rows enough, and the weights still lie where the graphs read them."""
        return slots <= self._rows and k == self._k and self._weights == [weight_addresses(m) for m in self._models]

    def allocate(self, slots: int, capacity: int) -> None:
        for cache in self.caches:
            cache.allocate(slots, capacity)

    def release(self) -> None:
        """Leave the caches' memory to the update."""
        for cache in self.caches:
            cache.release()

    def run(self, rows: RoundRows) -> Proposals:
        """Proposals for ``rows``, valid until the next run."""
        count = len(rows.tokens)
        for place, value in zip(self._input, rows, strict=True):
            place[:count].copy_(value)
        self._input.positions[count:].zero_()  # idle rows look at nothing but themselves
        self._launch(bucket_for(count, self._rows))
        return Proposals(*_first(self._output, count))

    def _launch(self, rows: int) -> None:
        if rows in self._graphs:
            self._graphs[rows].replay()
            return
        self._compute(rows)  # the first time as it is: that compiles kernels, which a capture must not do
        if self._pool is not None:
            self._capture(rows)

    def _compute(self, rows: int) -> None:
        spans = (0,) * self._k  # pages know how far they go
        made = self.round(RoundRows(*_first(self._input, rows)), spans)
        for place, value in zip(_first(self._output, rows), made, strict=True):
            place.copy_(value)

    def _capture(self, rows: int) -> None:
        try:
            with capturing(self._pool) as graph:
                self._compute(rows)
        except RuntimeError as error:
            self._pool = None
            warnings.warn(f"overrides go on without CUDA graphs, many times slower: {error}", stacklevel=2)
        else:
            self._graphs[rows] = graph


def _first(tensors: tuple[Tensor, ...], rows: int) -> list[Tensor]:
    return [tensor[:rows] for tensor in tensors]
