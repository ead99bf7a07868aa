"""Generation on a GPU: pages of keys and values, graphs of steps, and a host that runs behind the device.

    waiting prompts --prefill--> rows of the decoder --steps of a burst--> tokens, read one burst later

The host never waits while the device has work: it reads the tokens of a burst while the next one runs. So an
end of sequence is noticed up to two bursts late; what was drawn after it is dropped. Prompts are prefilled in
chunks of at most ``prefill_tokens`` tokens. Memory is taken page by page. When pages run out, the youngest
sequence is preempted: its pages are released, and it is prefilled again later with the tokens it has so far. Its
noise depends on seed and position alone, so it continues as it would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.errors import UserError
from luffy.kernels.paged import PAGE
from luffy.models.forward import forward_hidden, head_weight_bias
from luffy.models.machine import unused_bytes
from luffy.models.products import Products, separate
from luffy.rollout.engine import EngineStats
from luffy.rollout.native.decode_graphs import Decoder, Verifier
from luffy.rollout.native.paged_cache import (
    SCRATCH,
    CacheShape,
    Chunk,
    ChunksLayout,
    PagedCache,
    PagePool,
    cache_shape,
    pages_for,
)
from luffy.rollout.native.scheduler import PromptGroup, SequenceState
from luffy.rollout.sampling import SamplingRows, sample, signed
from luffy.types import Request, to_device

BURST = 8  # decoding steps between two looks at the results
SAMPLER_ROWS = 256  # rows that the plain sampler draws for at once: it keeps float32 copies of their logits
RESERVED_BYTES = 3 << 30  # left to activations of prefill and decoding when pages fill the memory


@dataclass(eq=False)
class PagedSequence(SequenceState):
    pages: list[int] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """Last position whose keys are read: the last token is never fed back."""
        return max(self.request.start + self.request.sampling.max_tokens - 2, 0)

    @property
    def room(self) -> int:
        """Tokens it may still get."""
        return self.request.sampling.max_tokens - len(self.token_ids)

    def receive(self, tokens: list[int], log_probs: list[float]) -> int:
        """Append up to and including the first end of sequence; how many were taken."""
        eos, room = self.request.sampling.eos_ids, self.room
        ends = [i for i, token in enumerate(tokens[:room]) if token in eos] if eos else []
        count = ends[0] + 1 if ends else min(room, len(tokens))
        if any(value != value for value in log_probs[:count]):
            raise self.nan_logits()
        self.token_ids.extend(tokens[:count])
        self.log_probs.extend(log_probs[:count])
        if ends:
            self.finish = "stop"
        elif count == room:
            self.finish = "length"
        return count


@dataclass(eq=False)
class Prompt(PromptGroup):
    """Tokens to prefill, and the sequences that start from them."""

    waiting: deque[PagedSequence] = field(default_factory=deque)  # type: ignore[assignment]
    pages: list[int] = field(default_factory=list)
    filled: int = 0  # tokens whose keys and values lie in the pages

    @property
    def is_filled(self) -> bool:
        return self.filled == len(self.token_ids)

    @property
    def shared_pages(self) -> int:
        """Number of full pages, which are never written again."""
        return len(self.token_ids) // PAGE


@dataclass(frozen=True)
class Burst:
    """Tokens on their way to the host: column i of [K, B] belongs to ``sequences[i]``."""

    sequences: tuple[PagedSequence, ...]
    tokens: Tensor
    log_probs: Tensor
    arrived: Any  # torch.cuda.Event, or None where copies are immediate

    def received(self) -> int:
        """Wait for the tokens and give them to the sequences that have not ended; how many were taken."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, log_probs = (part.T.contiguous().numpy() for part in (self.tokens, self.log_probs))  # [B, K]
        ends = set().union(*(sequence.request.sampling.eos_ids for sequence in self.sequences))
        look_closer = (np.isin(tokens, sorted(ends)) | np.isnan(log_probs)).any(1).tolist()
        ids, chosen, steps, taken = memoryview(tokens.tobytes()), memoryview(log_probs.tobytes()), tokens.shape[1], 0
        for i, sequence in enumerate(self.sequences):
            if sequence.finish is not None:
                continue
            if look_closer[i]:
                taken += sequence.receive(tokens[i].tolist(), log_probs[i].tolist())
            else:  # most, of thousands: their bytes as they are
                first, count = steps * i, min(steps, room := sequence.room)
                sequence.token_ids.frombytes(ids[8 * first : 8 * (first + count)])
                sequence.log_probs.frombytes(chosen[4 * first : 4 * (first + count)])
                if count == room:
                    sequence.finish = "length"
                taken += count
        return taken


class Rows:
    """The host's copy of the decoder's rows. All rows step together, so one clock counts for all; values that every
    burst needs are arrays over the rows, so that a thousand rows cost about as much as one."""

    def __init__(self, most: int, widest: int) -> None:
        self.sequences: list[PagedSequence] = []
        self.clock = 0  # steps launched in all
        self.table = np.full((most, widest), SCRATCH, dtype=np.int32)
        self._ends = np.zeros(most, dtype=np.int64)  # clock at which a row has drawn all it may
        self._newest = np.zeros(most, dtype=np.int64)  # position of its newest token, minus the clock
        self._limits = np.zeros(most, dtype=np.int64)
        self._held = np.zeros(most, dtype=np.int64)  # pages
        self._arrays = (self.table, self._ends, self._newest, self._limits, self._held)

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: PagedSequence, drawn: int) -> None:
        """Give a sequence the next row; ``drawn`` of its tokens are drawn or on their way to the host."""
        row = len(self)
        self.sequences.append(sequence)
        self._ends[row] = self.clock + sequence.request.sampling.max_tokens - drawn
        self._newest[row] = sequence.request.start + drawn - 1 - self.clock
        self._limits[row] = sequence.limit
        self._held[row] = len(sequence.pages)
        self.table[row] = SCRATCH
        self.table[row, : len(sequence.pages)] = sequence.pages

    def remaining(self) -> int:
        """Steps until the last row has drawn all it may."""
        return int(self._ends[: len(self)].max(initial=self.clock)) - self.clock

    def unfinished(self) -> np.ndarray:
        """Rows that have something left to draw, as far as is known."""
        unfinished = np.array([sequence.finish is None for sequence in self.sequences], dtype=bool)
        return np.flatnonzero(unfinished & (self._ends[: len(self)] > self.clock))

    def keep(self, rows: np.ndarray) -> list[PagedSequence]:
        """Keep only ``rows``, moved up to the front; returns the sequences of the others."""
        for array in self._arrays:
            array[: len(rows)] = array[rows]
        kept = set(rows.tolist())
        left = [sequence for row, sequence in enumerate(self.sequences) if row not in kept]
        self.sequences = [self.sequences[row] for row in rows]
        return left

    def move(self, counts: np.ndarray) -> None:
        """Each row has drawn so many tokens outside the common steps."""
        self._newest[: len(self)] += counts
        self._ends[: len(self)] -= counts

    def missing_pages(self, steps: int) -> np.ndarray:
        """Pages each row lacks to run so many further steps."""
        n = len(self)
        last = np.minimum(self._newest[:n] + self.clock + steps - 1, self._limits[:n])
        return np.maximum(last // PAGE + 1 - self._held[:n], 0)

    def grow(self, row: int, pages: list[int]) -> None:
        held = int(self._held[row])
        self.table[row, held : held + len(pages)] = pages
        self._held[row] += len(pages)
        self.sequences[row].pages += pages


class PagedMemory:
    """Graphs and their state, which an engine keeps between calls; pages are allocated for each."""

    def __init__(self, model: nn.Module, rows: int, context: int, share: float, products: Products = separate) -> None:
        self._model, self._rows, self._context, self._share = model, rows, context, share
        self.products = products
        self.cache = PagedCache(cache_shape(model), head_weight_bias(model)[0].device)
        self._decoder: Decoder | None = None
        self._verifier: Verifier | None = None

    def decoder(self) -> Decoder:
        if self._decoder is None or not self._decoder.is_current():
            self._decoder = self._verifier = None  # their graphs' memory first
            self._decoder = Decoder(self._model, self.cache, self._rows, pages_for(self._context), BURST, self.products)
        return self._decoder

    def verifier(self, tokens: int) -> Verifier:
        """For up to so many tokens of a row, over the current decoder."""
        if self._verifier is None:
            self._verifier = Verifier(self.decoder(), tokens)
        return self._verifier

    def allocate(self, wanted: int) -> PagePool:
        self.cache.release()
        count = pages_available(wanted, self.cache.shape, self.cache.device, self._share)
        if count < 2:
            raise UserError("no memory is left for the rollout's keys and values: use a smaller model or LoRA")
        self.cache.allocate(count)
        return PagePool(count)


class Results:
    """Tokens on their way to the host, and the sequences that they finished."""

    def __init__(self, device: torch.device, stats: EngineStats) -> None:
        self._device, self._stats = device, stats
        self._pending: deque[Burst] = deque()
        self.finished: list[PagedSequence] = []  # known to be finished, not yet handed out

    def __len__(self) -> int:
        return len(self._pending)

    def send(self, sequences: Sequence[PagedSequence], tokens: Tensor, log_probs: Tensor) -> None:
        """Start the copy of results to the host."""
        if self._device.type != "cuda":
            self._pending.append(Burst(tuple(sequences), tokens.clone(), log_probs.clone(), None))
            return
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (tokens, log_probs)]
        for target, source in zip(host, (tokens, log_probs), strict=True):
            target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending.append(Burst(tuple(sequences), host[0], host[1], arrived))

    def read(self, keep: int) -> None:
        """Wait for the bursts, except the newest ``keep``, and give the sequences their tokens."""
        while len(self._pending) > keep:
            burst = self._pending.popleft()
            unfinished = [sequence for sequence in burst.sequences if sequence.finish is None]
            self._stats.generated_tokens += burst.received()
            self.finished += [sequence for sequence in unfinished if sequence.finish is not None]

    def take_finished(self) -> list[PagedSequence]:
        finished, self.finished = self.finished, []
        return finished


class PromptQueue:
    """Prompts to prefill, first come first served, and the pages they hold until their sequences start."""

    def __init__(self, waiting: deque[Prompt], cache: PagedCache, pool: PagePool) -> None:
        self._waiting, self._cache, self._pool = waiting, cache, pool

    def __len__(self) -> int:
        return len(self._waiting)

    def next_chunks(self, budget: int, rows: int, soon: int, idle: bool) -> list[tuple[Prompt, Chunk]]:
        """Up to ``budget`` tokens of prompts for ``rows`` free rows. The running rows need ``soon`` pages; ``idle``:
        there are none."""
        chunks: list[tuple[Prompt, Chunk]] = []
        for prompt in self._waiting:
            if prompt.is_filled:
                rows -= len(prompt.waiting)
                continue
            alone = idle and prompt is self._waiting[0]
            if budget <= 0 or rows <= 0 or not self._allocate(prompt, soon, alone):
                break
            end = min(prompt.filled + budget, len(prompt.token_ids))
            chunks.append((prompt, Chunk(tuple(prompt.pages), prompt.filled, end)))
            budget -= end - prompt.filled
            rows -= len(prompt.waiting)
        return chunks

    def _allocate(self, prompt: Prompt, soon: int, alone: bool) -> bool:
        """Pages for the whole prompt, if enough are left for the running rows; whether it got them."""
        missing = pages_for(len(prompt.token_ids)) - len(prompt.pages)
        if alone and missing > self._pool.free:
            self.evict(besides=prompt)
        if missing > self._pool.free - (0 if alone else soon):
            if alone:
                raise UserError(
                    f"a prompt of {len(prompt.token_ids)} tokens does not fit the memory left for the cache"
                    f" ({self._pool.free} pages of {PAGE} tokens): free memory or use a smaller model"
                )
            return False
        prompt.pages += self._pool.allocate(missing)
        return True

    def evict(self, besides: Prompt | None = None) -> None:
        """Release the pages of waiting prompts; they will be prefilled again."""
        for prompt in self._waiting:
            if prompt is not besides and prompt.pages:
                self._pool.release(prompt.pages)
                prompt.pages, prompt.filled, prompt.first_logits = [], 0, None

    def start(self, rows: int) -> list[tuple[PagedSequence, Tensor]]:
        """Up to ``rows`` sequences of filled prompts, with the logits of their first token."""
        started: list[tuple[PagedSequence, Tensor]] = []
        copies: tuple[list[int], list[int]] = [], []
        while self._waiting and self._waiting[0].is_filled:
            prompt = self._waiting[0]
            assert prompt.first_logits is not None
            # The last sequence takes the prompt's own page, every other needs one more.
            while prompt.waiting and len(started) < rows and (self._pool.free > 0 or len(prompt.waiting) == 1):
                started.append((self._start_sequence(prompt, copies), prompt.first_logits))
            if prompt.waiting:
                break
            prompt.first_logits = None
            self._waiting.popleft()
        self._cache.copy(*copies)
        return started

    def _start_sequence(self, prompt: Prompt, copies: tuple[list[int], list[int]]) -> PagedSequence:
        """The next sequence of a prompt: it shares the full pages and has its own copy of the last one."""
        sequence = prompt.waiting.popleft()
        if not prompt.waiting:
            sequence.pages, prompt.pages = prompt.pages, []
            return sequence
        sequence.pages = self._pool.share(prompt.pages[: prompt.shared_pages])
        if len(prompt.pages) > prompt.shared_pages:
            (own,) = self._pool.allocate(1)
            copies[0].append(prompt.pages[-1])
            copies[1].append(own)
            sequence.pages.append(own)
        return sequence

    def split_first(self) -> None:
        """Separate the first sequence of the first prompt, when no page is left to start a second one next to it: it
        takes the prompt's pages, the others wait for another prefill."""
        prompt = self._waiting[0]
        assert prompt.is_filled and len(prompt.waiting) > 1, "another sequence could have run"
        again = Prompt(prompt.token_ids, deque(list(prompt.waiting)[1:]))
        prompt.waiting = deque([prompt.waiting[0]])
        self._waiting.insert(1, again)

    @property
    def missing(self) -> int:
        """Pages that the first prompt lacks."""
        return pages_for(len(self._waiting[0].token_ids)) - len(self._waiting[0].pages) if self._waiting else 0

    def add(self, prompts: Iterable[Prompt]) -> None:
        self._waiting.extend(prompts)

    def put_back(self, sequence: PagedSequence) -> None:
        """Queue a preempted sequence first, to be prefilled again with its tokens so far."""
        resumed = Prompt(sequence.request.given_ids + tuple(sequence.token_ids))
        resumed.waiting.append(sequence)
        self._waiting.appendleft(resumed)


class PagedGeneration:
    """One call of `generate`: up to ``max_rows`` sequences at once, prefill in chunks of ``prefill_tokens``."""

    def __init__(
        self, model: nn.Module, requests: Sequence[Request], memory: PagedMemory, max_rows: int, prefill_tokens: int
    ) -> None:
        waiting, most = prompts_of(requests), min(max_rows, len(requests))
        pages = sorted(map(_pages_of, requests), reverse=True)
        # Enough for as many of the longest as there are rows, and for a waiting prompt for each.
        prompts = sum(pages_for(len(prompt.token_ids)) for prompt in islice(waiting, most))
        self._set_up(model, waiting, memory, most, pages[0], sum(pages[:most]) + prompts + 1, prefill_tokens)

    def _set_up(
        self, model: nn.Module, waiting: deque[Prompt], memory: PagedMemory, most: int, widest: int, wanted: int,
        prefill_tokens: int,
    ) -> None:  # fmt: skip
        """``most`` rows of at most ``widest`` pages; ``wanted`` pages in all, if there is memory."""
        self.stats = EngineStats()
        self._model, self._prefill_tokens, self._products = model, prefill_tokens, memory.products
        self._head = head_weight_bias(model)
        self.device = memory.cache.device
        self._most = most
        self._cache = memory.cache
        self._decoder = memory.decoder()
        self._pool = memory.allocate(wanted)
        self._has_all_pages = self._pool.free == wanted - 1  # minus the scratch page
        self._prompts = PromptQueue(waiting, self._cache, self._pool)
        self._rows = Rows(self._most, widest)
        self._results = Results(self.device, self.stats)
        self._filters: list[SamplingRows] = []  # of the rows, part by part, when some want top-k or top-p
        self._rows_changed = True  # the rows on the device are not those of the host

    def run(self) -> Iterator[list[PagedSequence]]:
        """Finished sequences, as they are known to be finished. Their consumer works while a burst runs; so do the
        prompts' rounds, because rows that have drawn all they may are free before their tokens arrive."""
        while not self.is_done:
            yield self.advance()

    @property
    def is_done(self) -> bool:
        return not (self._prompts or len(self._rows) or self._results)

    def advance(self) -> list[PagedSequence]:
        """Prefill what there is room for, and queue a burst; the sequences that are known to be finished."""
        self._compact()
        worked = self._prefill_rounds()
        launched = self._launch()
        if not (worked or launched or self._results):
            self._prompts.split_first()
        self._results.read(keep=1 if launched else 0)
        return self._results.take_finished()

    def close(self) -> None:
        self._cache.release()

    # --- prompts ---

    def _prefill_rounds(self) -> bool:
        """Prefill before the next burst; returns whether there was anything to do. All rows that can start do so, since
        a step costs hardly more with all of them than with some. There is only one round if pages are short (further
        young rows would be preempted) or if responses end with their first token."""
        worked = more = self._prefill_round()
        while more and self._has_all_pages and len(self._rows):
            more = self._prefill_round()
        return worked

    def _prefill_round(self) -> bool:
        """Prefill up to ``prefill_tokens`` tokens of waiting prompts, and start the sequences that can; returns
        whether there was anything to do."""
        started = self._prompts.start(self._free_rows)
        self._start_rows(started)
        # Pages that the running rows need in the next burst or two.
        soon = int(self._rows.missing_pages(2 * BURST).sum()) if self._prompts else 0
        idle = not len(self._rows) and not self._results
        chunks = self._prompts.next_chunks(self._prefill_tokens, self._free_rows, soon, idle)
        if chunks:
            self._prefill_chunks(chunks)
            self._start_rows(self._prompts.start(self._free_rows))
        return bool(started or chunks)

    @property
    def _free_rows(self) -> int:
        return self._most - len(self._rows)

    def _prefill_chunks(self, chunks: Sequence[tuple[Prompt, Chunk]]) -> None:
        layout = ChunksLayout(self._cache, [chunk for _, chunk in chunks])
        tokens = [token for prompt, chunk in chunks for token in prompt.token_ids[chunk.start : chunk.end]]
        ids = _array_to_device(np.array(tokens, dtype=np.int64), self.device)
        hidden = forward_hidden(self._model, ids, layout.position_ids, layout, self._products)
        logits = F.linear(hidden[layout.last_tokens], *self._head)
        for (prompt, chunk), row in zip(chunks, logits, strict=True):
            prompt.filled = chunk.end
            if prompt.is_filled:
                prompt.first_logits = row.clone()  # alone: the others' rows may go
                self.stats.prefilled_prompts += 1
        self.stats.prefill_tokens += len(tokens)

    def _start_rows(self, started: Sequence[tuple[PagedSequence, Tensor]]) -> None:
        """Draw first tokens; a sequence of more than one token gets a row."""
        if not started:
            return
        drawn = [self._draw_first(started[i : i + SAMPLER_ROWS]) for i in range(0, len(started), SAMPLER_ROWS)]
        tokens, log_probs = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        sequences = [sequence for sequence, _ in started]
        self._results.send(sequences, tokens[None], log_probs[None])
        first_row, running = len(self._rows), []
        for i, sequence in enumerate(sequences):
            drawn_so_far = len(sequence.token_ids) + 1
            if drawn_so_far < sequence.request.sampling.max_tokens:
                self._rows.add(sequence, drawn_so_far)
                running.append(i)
            else:
                self._retire(sequence)
        place, state = slice(first_row, len(self._rows)), self._decoder.state
        state.tokens[place] = tokens[_array_to_device(np.array(running, dtype=np.int64), self.device)]
        positions = [sequences[i].length for i in running]
        state.positions[place] = _array_to_device(np.array(positions, dtype=np.int64), self.device)
        self._rows_changed = True

    def _draw_first(self, started: Sequence[tuple[PagedSequence, Tensor]]) -> tuple[Tensor, Tensor]:
        logits = torch.stack([row for _, row in started])
        rows = _sampling_rows([sequence for sequence, _ in started], self.device)
        positions = _array_to_device(np.array([sequence.length for sequence, _ in started]), self.device)
        return sample(logits, rows, positions)

    # --- rows ---

    def _compact(self) -> None:
        """Remove the rows that have nothing left to draw; the others move up."""
        unfinished = self._rows.unfinished()
        if len(unfinished) == len(self._rows):
            return
        order = _array_to_device(unfinished, self.device)
        for row in (self._decoder.state.tokens, self._decoder.state.positions):
            row[: len(unfinished)] = row[order]
        for sequence in self._rows.keep(unfinished):
            self._retire(sequence)
        self._rows_changed = True

    def _retire(self, sequence: PagedSequence) -> None:
        """A sequence has no row any more."""
        self._free_pages(sequence)

    def _free_pages(self, sequence: PagedSequence) -> None:
        """Release pages that work queued on the device may still use: later work is queued behind it."""
        self._pool.release(sequence.pages)
        sequence.pages = []

    def _upload(self) -> None:
        """Send the parameters of the rows to the device."""
        state, sequences = self._decoder.state, self._rows.sequences
        idle = len(state.limits) - len(sequences)

        def put(target: Tensor, values: list[Any], filler: Any, dtype: Any) -> None:
            target.copy_(_array_to_device(np.array(values + [filler] * idle, dtype=dtype), self.device))

        put(state.limits, [s.limit for s in sequences], 0, np.int64)
        put(state.seeds, [signed(s.request.seed) for s in sequences], 0, np.int64)
        put(state.temperatures, [s.request.sampling.temperature or 1.0 for s in sequences], 1.0, np.float32)
        put(state.greedy, [s.request.sampling.temperature == 0 for s in sequences], False, np.bool_)
        state.positions[len(sequences) :] = 0
        filtered = any(s.request.sampling.is_filtered for s in sequences)
        parts = [sequences[i : i + SAMPLER_ROWS] for i in range(0, len(sequences), SAMPLER_ROWS)] if filtered else []
        self._filters = [_sampling_rows(part, self.device) for part in parts]
        self._rows_changed = False

    def _upload_tables(self) -> None:
        count, table = len(self._rows), self._rows.table
        tables = self._decoder.state.tables
        tables[:count, : table.shape[1]] = _array_to_device(table[:count], self.device)
        tables[count:, 0] = SCRATCH  # idle rows stand at position 0

    def _grow(self, steps: int) -> None:
        """Allocate pages for the next burst; if there are too few, preempt the youngest rows."""
        while (missing := self._rows.missing_pages(steps)).sum() > self._pool.free:
            self._preempt()
        for row in np.flatnonzero(missing):
            self._rows.grow(int(row), self._pool.allocate(int(missing[row])))
        if self._rows_changed or missing.any():
            self._upload_tables()

    def _preempt(self) -> None:
        """Free pages: of rows that have finished, else of prompts that wait, else of the youngest row, which goes back
        to the queue."""
        free = self._pool.free
        self._results.read(keep=0)
        self._compact()
        if self._pool.free == free:
            self._prompts.evict()
        if self._pool.free > free or not len(self._rows):
            return
        if len(self._rows) == 1:
            raise UserError(
                f"one sequence of {self._rows.sequences[0].length} tokens fills the memory left for the cache: lower"
                " rollout.max_tokens, or leave more memory to the rollout"
            )
        (sequence,) = self._rows.keep(np.arange(len(self._rows) - 1))
        self._free_pages(sequence)
        self._rows_changed = True
        self._prompts.put_back(sequence)
        self.stats.preemptions += 1

    # --- steps ---

    def _launch(self) -> bool:
        """Queue a burst of steps on the device, without waiting for any."""
        steps = min(BURST, self._rows.remaining())
        self._grow(steps)
        if not self._rows:
            return False
        if self._rows_changed:
            self._upload()
        state, count = self._decoder.state, len(self._rows)
        state.step.zero_()
        for step in range(steps):
            self._one_step(step, count)
        self._rows.clock += steps
        self._results.send(self._rows.sequences, state.drawn[:steps, :count], state.log_probs[:steps, :count])
        self.stats.decode_steps += steps
        return True

    def _one_step(self, step: int, count: int) -> None:
        state = self._decoder.state
        if not self._filters:
            self._decoder.run(count)
            return
        # Top-k and top-p sort the vocabulary, which the graph does not: draw again from its logits.
        positions = state.positions[:count] + 1
        logits = self._decoder.run(count)
        for start, rows in zip(range(0, count, SAMPLER_ROWS), self._filters, strict=True):
            part = slice(start, min(start + SAMPLER_ROWS, count))
            tokens, log_probs = sample(logits[part], rows, positions[part])
            state.tokens[part] = tokens
            state.drawn[step, part] = tokens
            state.log_probs[step, part] = log_probs


def prompts_of(requests: Sequence[Request], first: int = 0) -> deque[Prompt]:
    """Requests with the same tokens share one prompt. ``first``: the number of the first request."""
    prompts: dict[tuple[int, ...], Prompt] = {}
    for index, request in enumerate(requests, start=first):
        prompt = prompts.setdefault(request.given_ids, Prompt(request.given_ids))
        prompt.waiting.append(PagedSequence(index, request))
    return deque(prompts.values())


def _pages_of(request: Request) -> int:
    """Pages of a sequence that runs to its longest."""
    return pages_for(request.start + max(request.sampling.max_tokens - 1, 0))


def pages_available(wanted: int, shape: CacheShape, device: torch.device, share: float = 1.0) -> int:
    """Number of pages, at most ``wanted``, that a share of the unused memory holds."""
    return affordable(wanted, shape.page_bytes, device, share)


def affordable(wanted: int, bytes_each: int, device: torch.device, share: float) -> int:
    if device.type != "cuda":
        return wanted
    return max(min(wanted, int(share * (unused_bytes(device) - RESERVED_BYTES)) // bytes_each), 0)


def _sampling_rows(sequences: Sequence[PagedSequence], device: torch.device) -> SamplingRows:
    return SamplingRows.of([sequence.request for sequence in sequences], device)


def _array_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)
