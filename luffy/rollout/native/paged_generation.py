"""Generation on a GPU: pages of keys and values, graphs of steps, and a host that runs behind the device.

    waiting prompts --prefill--> rows of the decoder --steps of a burst--> tokens, read one burst later

The device is never waited for while it has work: tokens of a burst are read while the next one runs. A
sequence that met its end of sequence is so noticed up to two bursts late; what it drew after that is
thrown away. Memory is taken page by page. When pages run out, the youngest sequence gives its own back
and starts again later from what it has said so far; its noise depends on seed and position alone, so it
goes on as it would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luffy.errors import UserError
from luffy.kernels.paged import PAGE
from luffy.models.forward import forward_hidden, head_weight_bias
from luffy.models.memory import unused_bytes
from luffy.rollout.engine import EngineStats
from luffy.rollout.native.decode_graphs import Decoder
from luffy.rollout.native.paged_cache import (
    SCRATCH,
    CacheShape,
    PagedCache,
    PagePool,
    Piece,
    PiecesLayout,
    cache_shape,
    pages_for,
    sent,
)
from luffy.rollout.native.scheduler import PromptGroup, SequenceState
from luffy.rollout.sampling import SamplingRows, sample, signed
from luffy.types import Request

if TYPE_CHECKING:
    from luffy.rollout.native import NativeEngine

BURST = 8  # decoding steps between two looks at the results
PLAIN_DRAWS = 256  # rows that the plain sampler draws for at once: it keeps float32 copies of their logits
RESERVED_BYTES = 3 << 30  # left to activations of prefill and decoding when pages fill the memory


@dataclass(eq=False)
class PagedSequence(SequenceState):
    pages: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.request.start + len(self.token_ids)

    @property
    def limit(self) -> int:
        """The last position whose keys anybody reads: the last token is never fed back."""
        return max(self.request.start + self.request.sampling.max_tokens - 2, 0)

    def receive(self, tokens: list[int], log_probs: list[float]) -> int:
        """Append up to and including the first end of sequence; how many were taken."""
        sampling = self.request.sampling
        room = sampling.max_tokens - len(self.token_ids)
        ends = [i for i, token in enumerate(tokens[:room]) if token in sampling.eos_ids] if sampling.eos_ids else []
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
        """Full pages: nobody writes to them any more."""
        return len(self.token_ids) // PAGE


@dataclass(frozen=True)
class Burst:
    """Tokens on their way to the host: column i of [K, B] is those of ``sequences[i]``."""

    sequences: tuple[PagedSequence, ...]
    tokens: Tensor
    log_probs: Tensor
    arrived: Any  # torch.cuda.Event, or None where copies are immediate

    def columns(self) -> Iterator[tuple[PagedSequence, list[int], list[float]]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return zip(self.sequences, self.tokens.T.tolist(), self.log_probs.T.tolist(), strict=True)


class Rows:
    """The host's picture of the decoder's rows. All rows step together, so one clock tells how far each is.

    Everything that is asked in every burst is an array over the rows: a thousand rows cost as much as one.
    """

    def __init__(self, most: int, widest: int) -> None:
        self.sequences: list[PagedSequence] = []
        self.clock = 0  # steps launched in all
        self.table = np.full((most, widest), SCRATCH, dtype=np.int32)
        self._ends = np.zeros(most, dtype=np.int64)  # clock at which a row has drawn all it may
        self._newest = np.zeros(most, dtype=np.int64)  # position of its newest token, less the clock
        self._limits = np.zeros(most, dtype=np.int64)
        self._held = np.zeros(most, dtype=np.int64)  # pages
        self._arrays = (self.table, self._ends, self._newest, self._limits, self._held)

    def __len__(self) -> int:
        return len(self.sequences)

    def seat(self, sequence: PagedSequence, drawn: int) -> None:
        """``drawn`` of its tokens are drawn or on their way."""
        row = len(self)
        self.sequences.append(sequence)
        self._ends[row] = self.clock + sequence.request.sampling.max_tokens - drawn
        self._newest[row] = sequence.request.start + drawn - 1 - self.clock
        self._limits[row] = sequence.limit
        self._held[row] = len(sequence.pages)
        self.table[row] = SCRATCH
        self.table[row, : len(sequence.pages)] = sequence.pages

    def remaining(self) -> int:
        """Steps until the last row is through."""
        return int(self._ends[: len(self)].max(initial=self.clock)) - self.clock

    def staying(self) -> np.ndarray:
        """Rows that have something left to draw, as far as is known."""
        unfinished = np.array([sequence.finish is None for sequence in self.sequences], dtype=bool)
        return np.flatnonzero(unfinished & (self._ends[: len(self)] > self.clock))

    def keep(self, rows: np.ndarray) -> list[PagedSequence]:
        """Close up around ``rows``; those who had to leave."""
        for array in self._arrays:
            array[: len(rows)] = array[rows]
        kept = set(rows.tolist())
        left = [sequence for row, sequence in enumerate(self.sequences) if row not in kept]
        self.sequences = [self.sequences[row] for row in rows]
        return left

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
    """What an engine keeps between calls: graphs and their state, not the pages."""

    def __init__(self, model: nn.Module, rows: int, context: int, share: float) -> None:
        self._model, self._rows, self._context, self._share = model, rows, context, share
        self.cache = PagedCache(cache_shape(model), head_weight_bias(model)[0].device)
        self._decoder: Decoder | None = None

    def decoder(self) -> Decoder:
        if self._decoder is None or not self._decoder.is_current():
            self._decoder = None  # its graphs' memory first
            self._decoder = Decoder(self._model, self.cache, self._rows, pages_for(self._context), BURST)
        return self._decoder

    def take(self, wanted: int) -> PagePool:
        self.cache.release()
        count = pages_available(wanted, self.cache.shape, self.cache.device, self._share)
        if count < 2:
            raise UserError("no memory is left for the rollout's keys and values: use a smaller model or LoRA")
        self.cache.allocate(count)
        return PagePool(count)


class PagedGeneration:
    """One call of `generate`."""

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], memory: PagedMemory) -> None:
        self.stats = EngineStats()
        self._model, self._prefill_tokens = engine.model, engine.prefill_tokens
        self._head = head_weight_bias(engine.model)
        self.device = memory.cache.device
        self._waiting = _prompts(requests)
        self._most = min(engine.max_slots, len(requests))
        self._cache = memory.cache
        self._decoder = memory.decoder()
        self._pool = memory.take(_pages_wanted(requests, self._most))
        self._rows = Rows(self._most, max(map(_pages_of, requests)))
        self._pending: deque[Burst] = deque()
        self._ended: list[PagedSequence] = []  # known to be finished, not yet handed out
        self._filters: list[SamplingRows] = []  # of the rows, part by part, when some want top-k or top-p
        self._moved = True  # the rows on the device are not those of the host

    def run(self) -> Iterator[PagedSequence]:
        """Finished sequences, as they are known to be finished."""
        while self._waiting or len(self._rows) or self._pending:
            worked = self._prefill_round()
            launched = self._launch()
            if not (worked or launched or self._pending):
                self._start_one()
            yield from self._collect(keep=1 if launched else 0)

    def close(self) -> None:
        self._cache.release()

    def _start_one(self) -> None:
        """No page is left to start a second sample of the prompt beside the first: let one go alone, with the
        prompt's own pages; the others wait for a prefill of their own."""
        prompt = self._waiting[0]
        assert prompt.is_filled and len(prompt.waiting) > 1, "somebody could have gone on"
        again = Prompt(prompt.token_ids, deque(list(prompt.waiting)[1:]))
        prompt.waiting = deque([prompt.waiting[0]])
        self._waiting.insert(1, again)

    # --- prompts ---

    def _prefill_round(self) -> bool:
        """Work on waiting prompts for at most ``prefill_tokens`` tokens, and seat who can start."""
        started = self._started()
        self._seat(started)
        pieces = self._next_pieces()
        if pieces:
            self._run_pieces(pieces)
            self._seat(self._started())
        return bool(started or pieces)

    def _next_pieces(self) -> list[tuple[Prompt, Piece]]:
        budget, rows = self._prefill_tokens, self._most - len(self._rows)
        pieces: list[tuple[Prompt, Piece]] = []
        for prompt in self._waiting:
            if prompt.is_filled:
                rows -= len(prompt.waiting)
                continue
            if budget <= 0 or rows <= 0 or not self._take_prompt_pages(prompt, first=not pieces):
                break
            end = min(prompt.filled + budget, len(prompt.token_ids))
            pieces.append((prompt, Piece(tuple(prompt.pages), prompt.filled, end)))
            budget -= end - prompt.filled
            rows -= len(prompt.waiting)
        return pieces

    def _take_prompt_pages(self, prompt: Prompt, first: bool) -> bool:
        """Pages for the whole prompt, when as many are left for those who are on their way."""
        missing = pages_for(len(prompt.token_ids)) - len(prompt.pages)
        nobody_else = first and not len(self._rows) and not self._pending
        if nobody_else and missing > self._pool.free:
            self._take_back_prompts(besides=prompt)
        if missing > self._pool.free - (0 if nobody_else else self._pages_soon()):
            if nobody_else:
                raise UserError(
                    f"a prompt of {len(prompt.token_ids)} tokens does not fit the memory left for the cache"
                    f" ({self._pool.free} pages of {PAGE} tokens): free memory or use a smaller model"
                )
            return False
        prompt.pages += self._pool.take(missing)
        return True

    def _take_back_prompts(self, besides: Prompt | None = None) -> None:
        """Prompts that wait with pages in hand give them back; they will be prefilled again."""
        for prompt in self._waiting:
            if prompt is not besides and prompt.pages:
                self._pool.give_back(prompt.pages)
                prompt.pages, prompt.filled, prompt.first_logits = [], 0, None

    def _pages_soon(self) -> int:
        """What the rows take in the next burst or two."""
        return int(self._rows.missing_pages(2 * BURST).sum())

    def _run_pieces(self, pieces: Sequence[tuple[Prompt, Piece]]) -> None:
        layout = PiecesLayout(self._cache, [piece for _, piece in pieces])
        tokens = [token for prompt, piece in pieces for token in prompt.token_ids[piece.start : piece.end]]
        ids = _to_device(np.array(tokens, dtype=np.int64), self.device)
        hidden = forward_hidden(self._model, ids, layout.position_ids, layout)
        logits = F.linear(hidden[layout.last_tokens], *self._head)
        for (prompt, piece), row in zip(pieces, logits, strict=True):
            prompt.filled = piece.end
            if prompt.is_filled:
                prompt.first_logits = row.clone()  # alone: the others' rows may go
                self.stats.prefilled_prompts += 1
        self.stats.prefill_tokens += len(tokens)

    def _started(self) -> list[tuple[PagedSequence, Tensor]]:
        """Sequences of filled prompts that get a row now, with the logits of their first token."""
        started: list[tuple[PagedSequence, Tensor]] = []
        copies: tuple[list[int], list[int]] = [], []
        while self._waiting and self._waiting[0].is_filled:
            prompt = self._waiting[0]
            assert prompt.first_logits is not None
            while prompt.waiting and len(self._rows) + len(started) < self._most and self._has_start_page(prompt):
                started.append((self._take_start(prompt, copies), prompt.first_logits))
            if prompt.waiting:
                break
            self._waiting.popleft()
        self._cache.copy(*copies)
        return started

    def _has_start_page(self, prompt: Prompt) -> bool:
        return self._pool.free > 0 or len(prompt.waiting) == 1

    def _take_start(self, prompt: Prompt, copies: tuple[list[int], list[int]]) -> PagedSequence:
        """The next sequence of a prompt: shares its full pages, has a page of its own for what is left over.
        The last one takes the prompt's own."""
        sequence = prompt.waiting.popleft()
        if not prompt.waiting:
            sequence.pages, prompt.pages = prompt.pages, []
            return sequence
        sequence.pages = self._pool.share(prompt.pages[: prompt.shared_pages])
        if len(prompt.pages) > prompt.shared_pages:
            (own,) = self._pool.take(1)
            copies[0].append(prompt.pages[-1])
            copies[1].append(own)
            sequence.pages.append(own)
        return sequence

    def _seat(self, started: Sequence[tuple[PagedSequence, Tensor]]) -> None:
        """Draw first tokens; who wants more than one gets a row."""
        if not started:
            return
        drawn = [self._draw_first(started[i : i + PLAIN_DRAWS]) for i in range(0, len(started), PLAIN_DRAWS)]
        tokens, log_probs = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        sequences = [sequence for sequence, _ in started]
        self._send(sequences, tokens[None], log_probs[None])
        self._close_up()
        first_row, seated = len(self._rows), []
        for i, sequence in enumerate(sequences):
            drawn_so_far = len(sequence.token_ids) + 1
            if drawn_so_far < sequence.request.sampling.max_tokens:
                self._rows.seat(sequence, drawn_so_far)
                seated.append(i)
            else:
                self._leave(sequence)
        place, state = slice(first_row, len(self._rows)), self._decoder.state
        state.tokens[place] = tokens[_to_device(np.array(seated, dtype=np.int64), self.device)]
        positions = [sequences[i].length for i in seated]
        state.positions[place] = _to_device(np.array(positions, dtype=np.int64), self.device)
        self._moved = True

    def _draw_first(self, started: Sequence[tuple[PagedSequence, Tensor]]) -> tuple[Tensor, Tensor]:
        logits = torch.stack([row for _, row in started])
        rows = _sampling_rows([sequence for sequence, _ in started], self.device)
        positions = _to_device(np.array([sequence.length for sequence, _ in started]), self.device)
        return sample(logits, rows, positions)

    # --- rows ---

    def _close_up(self) -> None:
        """Rows that have nothing left to draw leave, the others move up."""
        staying = self._rows.staying()
        if len(staying) == len(self._rows):
            return
        order = _to_device(staying, self.device)
        for row in (self._decoder.state.tokens, self._decoder.state.positions):
            row[: len(staying)] = row[order]
        for sequence in self._rows.keep(staying):
            self._leave(sequence)
        self._moved = True

    def _leave(self, sequence: PagedSequence) -> None:
        """Work queued on the device before still uses the pages; whatever comes later is queued behind it."""
        self._pool.give_back(sequence.pages)
        sequence.pages = []

    def _upload(self) -> None:
        """Tell the device who sits where."""
        state, sequences = self._decoder.state, self._rows.sequences
        idle = len(state.limits) - len(sequences)

        def put(target: Tensor, values: list[Any], filler: Any, dtype: Any) -> None:
            target.copy_(_to_device(np.array(values + [filler] * idle, dtype=dtype), self.device))

        put(state.limits, [s.limit for s in sequences], 0, np.int64)
        put(state.seeds, [signed(s.request.seed) for s in sequences], 0, np.int64)
        put(state.temperatures, [s.request.sampling.temperature or 1.0 for s in sequences], 1.0, np.float32)
        put(state.greedy, [s.request.sampling.temperature == 0 for s in sequences], False, np.bool_)
        state.positions[len(sequences) :] = 0
        filtered = any(s.request.sampling.top_k > 0 or s.request.sampling.top_p < 1 for s in sequences)
        parts = [sequences[i : i + PLAIN_DRAWS] for i in range(0, len(sequences), PLAIN_DRAWS)] if filtered else []
        self._filters = [_sampling_rows(part, self.device) for part in parts]
        self._moved = False

    def _upload_tables(self) -> None:
        count, table = len(self._rows), self._rows.table
        tables = self._decoder.state.tables
        tables[:count, : table.shape[1]] = _to_device(table[:count], self.device)
        tables[count:, 0] = SCRATCH  # idle rows stand at position 0

    def _grow(self, steps: int) -> None:
        """Pages for the next burst; if there are too few, the youngest rows make room."""
        while (missing := self._rows.missing_pages(steps)).sum() > self._pool.free:
            self._set_back()
        for row in np.flatnonzero(missing):
            self._rows.grow(int(row), self._pool.take(int(missing[row])))
        if self._moved or missing.any():
            self._upload_tables()

    def _set_back(self) -> None:
        """Somebody makes room: rows that have ended, else prompts that wait, else the youngest row, which goes back
        to the queue with what it has said so far."""
        free = self._pool.free
        self._ended = self._collect(keep=0)
        self._close_up()
        if self._pool.free == free:
            self._take_back_prompts()
        if self._pool.free > free or not len(self._rows):
            return
        if len(self._rows) == 1:
            raise UserError(
                f"one sequence of {self._rows.sequences[0].length} tokens fills the memory left for the cache: lower"
                " rollout.max_tokens, or leave more memory to the rollout"
            )
        (sequence,) = self._rows.keep(np.arange(len(self._rows) - 1))
        self._leave(sequence)
        self._moved = True
        resumed = Prompt(sequence.request.given_ids + tuple(sequence.token_ids))
        resumed.waiting.append(sequence)
        self._waiting.appendleft(resumed)
        self.stats.set_back += 1

    # --- steps ---

    def _launch(self) -> bool:
        """Queue a burst of steps on the device, without waiting for any."""
        self._close_up()
        steps = min(BURST, self._rows.remaining())
        self._grow(steps)
        if not self._rows:
            return False
        if self._moved:
            self._upload()
        state, count = self._decoder.state, len(self._rows)
        state.step.zero_()
        for step in range(steps):
            self._one_step(step, count)
        self._rows.clock += steps
        self._send(self._rows.sequences, state.drawn[:steps, :count], state.log_probs[:steps, :count])
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
        for start, rows in zip(range(0, count, PLAIN_DRAWS), self._filters, strict=True):
            part = slice(start, min(start + PLAIN_DRAWS, count))
            tokens, log_probs = sample(logits[part], rows, positions[part])
            state.tokens[part] = tokens
            state.drawn[step, part] = tokens
            state.log_probs[step, part] = log_probs

    def _send(self, sequences: Sequence[PagedSequence], tokens: Tensor, log_probs: Tensor) -> None:
        """Start the copy of results to the host."""
        if self.device.type != "cuda":
            self._pending.append(Burst(tuple(sequences), tokens.clone(), log_probs.clone(), None))
            return
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (tokens, log_probs)]
        for target, source in zip(host, (tokens, log_probs), strict=True):
            target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending.append(Burst(tuple(sequences), host[0], host[1], arrived))

    def _collect(self, keep: int) -> list[PagedSequence]:
        """Read what has arrived, but for the newest ``keep`` bursts; the sequences that ended."""
        ended, self._ended = self._ended, []
        while len(self._pending) > keep:
            for sequence, tokens, log_probs in self._pending.popleft().columns():
                if sequence.finish is None:
                    self.stats.generated_tokens += sequence.receive(tokens, log_probs)
                    if sequence.finish is not None:
                        ended.append(sequence)
        return ended


def _prompts(requests: Sequence[Request]) -> deque[Prompt]:
    """Requests with the same tokens share one prompt."""
    prompts: dict[tuple[int, ...], Prompt] = {}
    for index, request in enumerate(requests):
        prompt = prompts.setdefault(request.given_ids, Prompt(request.given_ids))
        prompt.waiting.append(PagedSequence(index, request, prompt))
    return deque(prompts.values())


def _pages_of(request: Request) -> int:
    """Pages of a sequence that runs to its longest."""
    return pages_for(request.start + max(request.sampling.max_tokens - 1, 0))


def _pages_wanted(requests: Sequence[Request], rows: int) -> int:
    """Enough for the ``rows`` longest at once, each with a prompt of its own waiting."""
    longest = sorted(map(_pages_of, requests), reverse=True)[:rows]
    prompts = sum(pages_for(len(p.token_ids)) for p in list(_prompts(requests))[:rows])
    return sum(longest) + prompts + 1


def pages_available(wanted: int, shape: CacheShape, device: torch.device, share: float = 1.0) -> int:
    """Of ``wanted`` pages, what a share of the memory that nobody uses can hold."""
    return affordable(wanted, shape.page_bytes, device, share)


def affordable(wanted: int, bytes_each: int, device: torch.device, share: float) -> int:
    if device.type != "cuda":
        return wanted
    return max(min(wanted, int(share * (unused_bytes(device) - RESERVED_BYTES)) // bytes_each), 0)


def _sampling_rows(sequences: Sequence[PagedSequence], device: torch.device) -> SamplingRows:
    return SamplingRows.of([sequence.request for sequence in sequences], device)


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return sent(torch.from_numpy(np.ascontiguousarray(array)), device)
