"""The native engine: generates with the policy's own weights, in the policy's own process.

    Scheduler     which request sits in which slot        (host only)
    SlotCache     the keys and values of the slots
    ModelRunner   tokens to logits: prefill and decode
    sample        logits to tokens

A step costs one forward pass over the live slots and one small transfer of the sampled tokens. On a GPU
`luffy.rollout.native.paged_generation` takes the place of all four for the models that have a fused form.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.errors import UserError
from luffy.models.attention import Layout, PackedLayout
from luffy.models.forward import causal_lm, forward_hidden, head_weight_bias
from luffy.models.fused import fused_decoder
from luffy.models.plain import runs_plain
from luffy.rollout.engine import Engine, EngineStats, Progress, check_request
from luffy.rollout.native.scheduler import Admission, Scheduler, SequenceState
from luffy.rollout.native.slot_cache import SlotCache, Slots
from luffy.rollout.native.static_batch import PlainGeneration
from luffy.rollout.sampling import SamplingRows, sample
from luffy.types import Completion, Request

if TYPE_CHECKING:
    from luffy.rollout.native.paged_generation import PagedGeneration, PagedMemory

# Attention reads cached positions in whole blocks: the vector units like it, and the result then hardly
# depends on the longest neighbour. The exact block is the unit in which the CPU kernel walks the keys.
SPAN_BLOCK = 16
EXACT_SPAN_BLOCK = 512

# Sequences decoded at once, unless given.
CPU_SLOTS = 256
GPU_SLOTS = 1024


def default_slots(device: str) -> int:
    return GPU_SLOTS if device == "cuda" else CPU_SLOTS


class ModelRunner:
    """Tokens to logits."""

    def __init__(self, model: nn.Module, cache: Slots) -> None:
        self._model = model
        self._cache = cache
        self._weight, self._bias = head_weight_bias(model)
        self.device = self._weight.device

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Logits [S, V] after each prompt; its keys and values stay in its slot."""
        layout = PackedLayout([len(ids) for ids in prompts], self.device, self._cache, slots)
        tokens = torch.tensor([token for ids in prompts for token in ids], device=self.device)
        hidden = forward_hidden(self._model, tokens, layout.position_ids, layout)
        return self._logits(hidden[layout.last_tokens])

    def decode(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Logits [N, V] after each of the N new tokens of the first slots."""
        return self._logits(forward_hidden(self._model, tokens, positions, layout))

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weight, self._bias)


@dataclass
class DecodeBatch:
    """The live slots as the device sees them; rebuilt only when the live sequences change."""

    sequences: tuple[SequenceState, ...]
    tokens: Tensor  # [rows] newest token of each slot
    positions: Tensor  # [rows] where that token stands
    sampling: SamplingRows

    @classmethod
    def of(cls, sequences: Sequence[SequenceState], idle_rows: int, device: torch.device) -> DecodeBatch:
        """Idle rows repeat the first sequence's parameters and write to the start of their own free slots."""
        requests = [seq.request for seq in sequences] + [sequences[0].request] * idle_rows
        tokens = [seq.token_ids[-1] for seq in sequences] + [0] * idle_rows
        positions = [seq.length - 1 for seq in sequences] + [0] * idle_rows
        rows = SamplingRows.of(requests, device)
        return cls(tuple(sequences), torch.tensor(tokens, device=device), torch.tensor(positions, device=device), rows)

    def advance(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.positions = self.positions + 1


class Generation:
    """One call of `generate`: its cache, its queue, its counts.

    ``lookahead`` is how far beyond a response's last place a step may write.
    """

    _state: type[SequenceState] = SequenceState

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], lookahead: int = 0) -> None:
        self._exact = engine.batch_invariant
        self._prefill_tokens = 1 if self._exact else engine.prefill_tokens
        slots = engine.max_slots if self._exact else min(engine.max_slots, len(requests))
        self._block = EXACT_SPAN_BLOCK if self._exact else SPAN_BLOCK
        capacity = self._rounded(max(map(_cached_tokens, requests)) + lookahead)
        self._caches = self._make_caches(engine, slots, capacity)
        self._cache = self._caches[0]
        self._runner = ModelRunner(engine.model, self._cache)
        self._scheduler = Scheduler(requests, self._cache.slots, self._state)
        self._batch: DecodeBatch | None = None
        self.stats = EngineStats()

    def _make_caches(self, engine: NativeEngine, slots: int, capacity: int) -> list[Slots]:
        """One per model, the policy's first."""
        return [cache_for(engine.model, slots, capacity)]

    def run(self) -> Iterator[SequenceState]:
        """Finished sequences, as they finish."""
        while not self._scheduler.is_done:
            yield from self._fill_slots()
            if self._scheduler.live:
                self._step()
                yield from self._scheduler.release_finished()

    def close(self) -> None:
        """The cache goes with this object."""

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self._block) * self._block

    def _fill_slots(self) -> Iterator[SequenceState]:
        """Start waiting requests until every slot is taken; one-token responses end here already."""
        while admissions := self._scheduler.admit(self._prefill_tokens):
            self._prefill([admission for admission in admissions if admission.source is None])
            for admission in admissions:
                source = admission.slots[0] if admission.source is None else admission.source
                self._copy(source, admission.slots, len(admission.group.token_ids))
            self._draw_first_tokens(admissions)
            yield from self._scheduler.release_finished()
        for move in self._scheduler.compact():
            self._copy(move.source, [move.target], move.length)

    def _copy(self, source: int, targets: Sequence[int], length: int) -> None:
        for cache in self._caches:
            cache.copy(source, targets, length)

    def _prefill(self, admissions: Sequence[Admission]) -> None:
        if not admissions:
            return
        prompts = [admission.group.token_ids for admission in admissions]
        logits = self._prompt_logits(prompts, [admission.slots[0] for admission in admissions])
        for admission, row in zip(admissions, logits, strict=True):
            admission.group.first_logits = row
        self.stats.prefilled_prompts += len(prompts)
        self.stats.prefill_tokens += sum(map(len, prompts))

    def _prompt_logits(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        return self._runner.prefill(prompts, slots)

    def _draw_first_tokens(self, admissions: Sequence[Admission]) -> None:
        started = [sequence for admission in admissions for sequence in admission.sequences]
        logits = torch.stack([_first_logits(sequence) for sequence in started])
        rows = SamplingRows.of([sequence.request for sequence in started], self._runner.device)
        positions = torch.tensor([sequence.length for sequence in started], device=self._runner.device)
        self._start(started, logits, rows, positions)
        for admission in admissions:
            if not admission.group.waiting:
                admission.group.first_logits = None

    def _start(self, sequences: Sequence[SequenceState], logits: Tensor, rows: SamplingRows, positions: Tensor) -> None:
        self._record(sequences, *sample(logits, rows, positions))

    def _step(self) -> None:
        batch = self._decode_batch()
        span = self._rounded(max(sequence.length for sequence in batch.sequences))
        layout = self._cache.decode_layout(batch.positions, span)
        logits = self._runner.decode(batch.tokens, batch.positions, layout)
        tokens, log_probs = sample(logits, batch.sampling, batch.positions + 1)
        batch.advance(tokens)
        self._record(batch.sequences, tokens, log_probs)
        self.stats.decode_steps += 1

    def _decode_batch(self) -> DecodeBatch:
        live = self._scheduler.live
        if self._batch is None or list(self._batch.sequences) != live:
            idle = self._cache.slots - len(live) if self._exact else 0
            self._batch = DecodeBatch.of(live, idle, self._runner.device)
        return self._batch

    def _record(self, sequences: Sequence[SequenceState], tokens: Tensor, log_probs: Tensor) -> None:
        """The one transfer of a step: ids and log-probs together (ids are exact in float64)."""
        ids, chosen = torch.stack((tokens.double(), log_probs.double()))[:, : len(sequences)].tolist()
        for sequence, token, log_prob in zip(sequences, ids, chosen, strict=True):
            sequence.append(int(token), log_prob)
        self.stats.generated_tokens += len(sequences)


class NativeEngine(Engine):
    """Continuous batching over KV slots, on the very weights that are being trained.

    A response depends on its request alone: the noise is a function of seed and position. Rounding is
    what is left, since matrix kernels add in an order that depends on the number of rows. Alone against
    a crowd, float32 changed none of 9,800 tokens, bfloat16 about 1 in 35 on SmolLM2-135M.
    ``batch_invariant`` removes that too, to the bit, by running every step with ``max_slots`` rows and
    every prompt alone; it costs speed when few slots are live or prompts are short.
    """

    def __init__(
        self,
        model: nn.Module,
        max_slots: int | None = None,
        max_context: int | None = None,
        prefill_tokens: int | None = None,
        batch_invariant: bool = False,
        decoding: Literal["auto", "slots", "pages"] = "auto",
        memory_share: float = 1.0,
    ) -> None:
        device = next(model.parameters()).device.type
        max_slots = default_slots(device) if max_slots is None else max_slots
        if max_slots < 1:
            raise UserError(f"max_slots is {max_slots}: the engine needs at least 1")
        if batch_invariant and decoding == "pages":
            raise UserError("batch_invariant needs decoding in slots: over pages rounding depends on the batch")
        longest = causal_lm(model).config.max_position_embeddings
        if max_context is not None and not 1 <= max_context <= longest:
            raise UserError(f"max_context is {max_context}: the model takes 1 to {longest} tokens")
        self.model = model
        self.max_slots = max_slots
        self.max_context = max_context or longest
        self.prefill_tokens = prefill_tokens or (16384 if device == "cuda" else 4096)
        self.batch_invariant = batch_invariant
        self.decoding = decoding
        self.memory_share = memory_share  # of the GPU memory that is unused when a call begins
        self.version = 0
        self._paged: PagedMemory | None = None
        self.stats = EngineStats()

    def sync(self, version: int) -> None:
        """Nothing to copy: the weights are the policy's own."""
        self.version = version

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
        """Completions in the order of ``requests``; ``progress`` hears (finished, all)."""
        if not requests:
            return []
        self._check(requests)
        started = time.perf_counter()
        completions: dict[int, Completion] = {}
        with torch.no_grad(), self._ready():
            generation = self._generation(requests)
            try:
                for sequence in generation.run():
                    completions[sequence.index] = sequence.completion()
                    if progress is not None:
                        progress(len(completions), len(requests))
            finally:
                generation.close()
        self.stats = generation.stats
        self.stats.seconds = time.perf_counter() - started
        return [completions[index] for index in range(len(requests))]

    def _check(self, requests: Sequence[Request]) -> None:
        vocabulary = causal_lm(self.model).config.vocab_size
        for request in requests:
            check_request(request, self.max_context, vocabulary)

    def _ready(self) -> AbstractContextManager[None]:
        return evaluating(self.model)

    def _generation(self, requests: Sequence[Request]) -> Generation | PagedGeneration | PlainGeneration:
        if runs_plain(self.model):
            return PlainGeneration(self, requests)
        if not self._uses_pages():
            return Generation(self, requests)
        from luffy.rollout.native.paged_generation import PagedGeneration, PagedMemory

        if self._paged is None:
            self._paged = PagedMemory(self.model, self.max_slots, self.max_context, self.memory_share)
        return PagedGeneration(self, requests, self._paged)

    def _uses_pages(self) -> bool:
        """Pages and graphs need kernels, which some models do not have; to the bit, there are only slots."""
        if self.decoding != "auto":
            return self.decoding == "pages"
        if self.batch_invariant or not next(self.model.parameters()).is_cuda:
            return False
        slow = [type(causal).__name__ for causal in map(causal_lm, self._models()) if fused_decoder(causal) is None]
        for name in slow:
            _warn_slow(name)
        return not slow

    def _models(self) -> tuple[nn.Module, ...]:
        return (self.model,)


@functools.cache
def _warn_slow(name: str) -> None:
    warnings.warn(
        f"{name} has no fused form here (Triton with a Llama, Qwen2, Qwen3 or Mistral model): its decoding runs"
        " without CUDA graphs, correct but many times slower",
        stacklevel=4,
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no gradient checkpointing), then every module as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def cache_for(model: nn.Module, slots: int, capacity: int) -> SlotCache:
    return SlotCache(causal_lm(model).config.num_hidden_layers, slots, capacity)


def _cached_tokens(request: Request) -> int:
    """Positions a request needs in the cache: the last new token is never fed back."""
    return request.start + request.sampling.max_tokens - 1


def _first_logits(sequence: SequenceState) -> Tensor:
    assert sequence.group.first_logits is not None
    return sequence.group.first_logits
