"""The native engine: generates with the policy's own weights, in the policy's own process.

Three ways to generate, one interface (`Generation`):

    slot_generation.py    KV slots of fixed size: a CPU, and a GPU where every bit counts or kernels are missing
    paged_generation.py   pages and CUDA graphs: a GPU, for the models that have a fused form
    static_batch.py       the model's own forward pass and cache: any other causal LM
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from luffy.errors import UserError
from luffy.metrics import Mean, Metric
from luffy.models.forward import causal_lm, evaluating, fused_decoder, max_positions, text_config
from luffy.models.products import Fp8Products, Products, fp8_fault, separate
from luffy.models.products import merged as merged_products
from luffy.rollout.engine import Engine, EngineStats, OnProgress, RequestSource, check_request
from luffy.rollout.native.drafts import Drafts
from luffy.rollout.native.slot_generation import Generation, PolicyDecoder, SlotConversations, SlotGeneration, SlotPlan
from luffy.rollout.native.static_batch import StaticBatchGeneration
from luffy.types import Completion, Request

if TYPE_CHECKING:
    from luffy.rollout.native.paged_conversations import PagedConversations, PagedMemory

# Sequences decoded at once, unless given.
CPU_SLOTS = 256
GPU_SLOTS = 1024
STREAMED_AT_ONCE = 65_536  # requests of a stream, about a kilobyte each

Decoding = Literal["auto", "slots", "pages"]
Precision = Literal["model", "fp8"]  # of linear layers in a rollout


def default_slots(device: str) -> int:
    return GPU_SLOTS if device == "cuda" else CPU_SLOTS


def default_prefill_tokens(device: str) -> int:
    """Tokens of prompts that go through the model at once, unless given."""
    return 16384 if device == "cuda" else 4096


Finished = list[tuple[int, Completion]]  # each with the number of its request
OnFinished = Callable[[Finished], None]


def finished_of(generation: Generation) -> Iterator[Finished]:
    """Completions as they finish; ``generation`` is closed at the end."""
    try:
        for sequences in generation.run():
            if sequences:
                yield [(sequence.index, sequence.completion()) for sequence in sequences]
    finally:
        generation.close()


def in_order(
    finished: Iterator[Finished], count: int, progress: OnProgress | None, on_finished: OnFinished | None = None
) -> list[Completion]:
    """The ``count`` completions of ``finished`` in the order of their requests."""
    completions: dict[int, Completion] = {}
    for part in finished:
        completions.update(part)
        if on_finished is not None:
            on_finished(part)
        if progress is not None:
            progress(len(completions), count)
    return [completions[index] for index in range(count)]


class NativeEngine(Engine):
    """Continuous batching, over slots or pages, on the very weights that are being trained.

    A response depends on its request alone: the noise is a function of seed and position. Rounding is
    what is left, since matrix kernels add in an order that depends on the number of rows. Alone against
    a crowd, float32 changed none of 9,800 tokens, bfloat16 about 1 in 35 on SmolLM2-135M.
    ``batch_invariant`` removes that too, to the bit, by running every step with ``max_slots`` rows and
    every prompt alone; it costs speed when few slots are live or prompts are short.

    With ``merged``, over pages, queries, keys and values come from one product, and so do gate and up
    (`luffy.models.products`). With ``precision="fp8"`` every call begins with a quantized copy of the layers' linear
    weights and computes with that (`luffy.models.products`); its log-probs are those of the copy.

    With ``drafts``, where few sequences run, a pass verifies several tokens of each (`luffy.rollout.native.drafts`);
    models that have only the static batch do without.
    """

    def __init__(
        self,
        model: nn.Module,
        max_slots: int | None = None,
        max_context: int | None = None,
        prefill_tokens: int | None = None,
        batch_invariant: bool = False,
        decoding: Decoding = "auto",
        memory_share: float = 1.0,
        merged: bool = True,
        precision: Precision = "model",
        drafts: Drafts | None = None,
    ) -> None:
        device = next(model.parameters()).device.type
        max_slots = default_slots(device) if max_slots is None else max_slots
        if max_slots < 1:
            raise UserError(f"max_slots is {max_slots}: the engine needs at least 1")
        if batch_invariant and decoding == "pages":
            raise UserError("batch_invariant needs decoding in slots: over pages rounding depends on the batch")
        if batch_invariant and drafts is not None:
            raise UserError("batch_invariant excludes drafts: a pass over several tokens rounds otherwise")
        longest = max_positions(causal_lm(model).config)
        if max_context is not None and not 1 <= max_context <= longest:
            raise UserError(f"max_context is {max_context}: the model takes 1 to {longest} tokens")
        self.model = model
        self.max_slots = max_slots
        self.max_context = max_context or longest
        self.prefill_tokens = prefill_tokens or default_prefill_tokens(device)
        self.batch_invariant = batch_invariant
        self.decoding = decoding
        self.drafts = drafts
        self.memory_share = memory_share  # of the GPU memory that is unused when a call begins
        self._products: Products = merged_products if merged else separate
        self.version = 0
        if precision == "fp8":
            self._products = self._fp8_products()
        if device == "cuda" and decoding != "slots" and not batch_invariant:
            self._merge_weights()  # before anything else takes memory, or reads the weights where they lie
        self._paged: PagedMemory | None = None
        self._quantize_seconds = 0.0
        self.stats = EngineStats()

    def sync(self, version: int) -> None:
        """Note the version; there is nothing to copy, because the weights are the policy's own."""
        self.version = version

    def generate(
        self, requests: Sequence[Request], progress: OnProgress | None = None, on_finished: OnFinished | None = None
    ) -> list[Completion]:
        """Completions in the order of ``requests``; ``progress`` hears (finished, all), ``on_finished`` the
        completions that finished since it heard of the last ones."""
        return in_order(self._finished(requests), len(requests), progress, on_finished) if requests else []

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[int, Completion]]:
        """A slot that becomes free takes the next request. Every so many, which must fit the host's memory, the slots
        run empty."""
        source, first = iter(requests), 0
        while part := list(islice(source, STREAMED_AT_ONCE)):
            for finished in self._finished(part):
                yield from ((first + index, completion) for index, completion in finished)
            first += len(part)

    @torch.no_grad()
    def serve(self, source: RequestSource) -> None:
        """A request begins as soon as there is room, and a conversation keeps its cache; a model of another family is
        asked for those that are ready together."""
        if StaticBatchGeneration.serves(self.model):
            return super().serve(source)
        started = time.perf_counter()
        with evaluating(self.model):
            conversations = self._conversations(source)
            try:
                conversations.serve(source, self._check)
            finally:
                conversations.close()
        self.stats = conversations.stats
        self.stats.seconds = time.perf_counter() - started

    def _conversations(self, source: RequestSource) -> SlotConversations | PagedConversations:
        longest = min(source.longest, self.max_context)
        if uses_pages([self.model], self.decoding, self.batch_invariant):
            from luffy.rollout.native.drafted_generation import conversations_over_pages

            sizes = (self.max_slots, longest, self.prefill_tokens)
            return conversations_over_pages(self.drafts, self.model, source, self._paged_memory(), *sizes)
        plan = SlotPlan.sized(source.most, longest + self._lookahead, self.max_slots, self.batch_invariant)
        return SlotConversations(self._slot_decoder(plan), self.prompt_budget)

    @property
    def _lookahead(self) -> int:
        """How far beyond a response's last position a step may write."""
        return 0 if self.drafts is None else self.drafts.tokens - 1

    def _slot_decoder(self, plan: SlotPlan) -> PolicyDecoder:
        if self.drafts is None:
            return PolicyDecoder(self.model, plan)
        return self.drafts.slot_decoder(self.model, plan, self.max_context)

    def _check(self, requests: Sequence[Request]) -> None:
        vocabulary = text_config(causal_lm(self.model).config).vocab_size
        # Samples of a problem have the very same tokens; comparing them would take longer than the check.
        alike = {(id(r.prompt_ids), id(r.prefix_ids), id(r.sampling)): r for r in requests}
        for request in alike.values():
            check_request(request, self.max_context, vocabulary)

    @torch.no_grad()
    def _finished(self, requests: Sequence[Request]) -> Iterator[Finished]:
        self._check(requests)
        started = time.perf_counter()
        with evaluating(self.model):
            generation = self._generation(requests)
            yield from finished_of(generation)
        self.stats = generation.stats
        self.stats.seconds = time.perf_counter() - started

    def _generation(self, requests: Sequence[Request]) -> Generation:
        if StaticBatchGeneration.serves(self.model):
            return StaticBatchGeneration(self.model, requests, self.max_slots)
        if not uses_pages([self.model], self.decoding, self.batch_invariant):
            plan = SlotPlan.of(requests, self.max_slots, self.batch_invariant, self._lookahead)
            return SlotGeneration(requests, self._slot_decoder(plan), self.prompt_budget)
        from luffy.rollout.native.drafted_generation import generation_over_pages

        sizes = (self.max_slots, self.prefill_tokens)
        return generation_over_pages(self.drafts, self.model, requests, self._paged_memory(), *sizes)

    def _paged_memory(self) -> PagedMemory:
        from luffy.rollout.native.paged_conversations import PagedMemory

        self._merge_weights()  # again, if they were moved
        if isinstance(self._products, Fp8Products):
            self._quantize(self._products)
        if self._paged is None:
            self._paged = PagedMemory(self.model, self.max_slots, self.max_context, self.memory_share, self._products)
        return self._paged

    def _merge_weights(self) -> None:
        decoder = None if self._products is separate else fused_decoder(causal_lm(self.model))
        if decoder is not None:
            decoder.merge_weights()

    def _fp8_products(self) -> Fp8Products:
        decoder = fused_decoder(causal_lm(self.model))
        if decoder is None or not uses_pages([self.model], self.decoding, self.batch_invariant):
            fault: str | None = "that needs an NVIDIA GPU with Triton and a Llama, Qwen2, Qwen3 or Mistral model"
        else:
            fault = fp8_fault(decoder.layers)
        if fault is not None:
            raise UserError(f"no rollouts in fp8 (rollout.precision): {fault}")
        return Fp8Products()

    def _quantize(self, products: Fp8Products) -> None:
        decoder = fused_decoder(causal_lm(self.model))
        assert decoder is not None, "pages are for models with a fused form"
        started = time.perf_counter()
        products.refresh(decoder.layers)
        if next(self.model.parameters()).is_cuda:
            torch.cuda.current_stream().synchronize()
        self._quantize_seconds += time.perf_counter() - started

    def metrics(self) -> dict[str, Metric]:
        found = {} if self.drafts is None else self.drafts.metrics()
        if isinstance(self._products, Fp8Products):
            found["rollout/quantize_s"] = Mean(self._quantize_seconds)
            self._quantize_seconds = 0.0
        return found

    @property
    def prompt_budget(self) -> int:
        """Tokens of one prefill into slots; to the bit, every prompt goes alone."""
        return 1 if self.batch_invariant else self.prefill_tokens


def uses_pages(models: Sequence[nn.Module], decoding: Decoding, batch_invariant: bool) -> bool:
    """Whether ``models`` decode over pages, with graphs. That needs kernels, which some models do not have; to the
    bit, there are only slots."""
    if decoding != "auto":
        return decoding == "pages"
    if batch_invariant or not next(models[0].parameters()).is_cuda:
        return False
    slow = [type(causal).__name__ for causal in map(causal_lm, models) if fused_decoder(causal) is None]
    for name in slow:
        _warn_slow(name)
    return not slow


@functools.cache
def _warn_slow(name: str) -> None:
    warnings.warn(
        f"{name} has no fused form here (Triton with a Llama, Qwen2, Qwen3 or Mistral model): its decoding runs"
        " without CUDA graphs, correct but many times slower",
        stacklevel=4,
    )
