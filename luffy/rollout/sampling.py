"""Drawing tokens: noise is a pure function of (seed, position, token), the same in every batch.

The noise comes from an integer hash, not from a generator with state, so a row draws the same token
in every batch. Every token runs a race: an exponential clock with its probability as the
rate, and the first to ring is drawn, which happens exactly with that probability. Walking one uniform
number along the cumulative distribution would be cheaper, but there a rounding error in one
probability shifts every later token: on a vocabulary of 49k it changed 1 draw in 60 between batch
shapes in float32, where the race changes about as many draws as the probabilities differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.types import Request, to_device


def signed(value: int, bits: int = 64) -> int:
    """The signed integer with the same bits: torch has no unsigned arithmetic."""
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


# SplitMix64 (Steele, Lea, Flood 2014) turns seed and position into the key of a row.
GOLDEN = signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB))
# A 32-bit mixer of the same make, fast enough for every token of a vocabulary.
TOKEN_STRIDE = signed(0x9E3779B1, 32)
TOKEN_MULTIPLIERS = (signed(0x7FEB352D, 32), signed(0x846CA68B, 32))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of int64: torch's own copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finalizer of SplitMix64; int64 products wrap as it needs."""
    bits = (bits ^ _shift_right(bits, 30)) * MULTIPLIERS[0]
    bits = (bits ^ _shift_right(bits, 27)) * MULTIPLIERS[1]
    return bits ^ _shift_right(bits, 31)


def token_bits(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """[B, V] int32 hash of (seed, position, token). In place: fresh memory costs more than arithmetic."""
    keys = _mix(_mix(seeds) + (positions + 1) * GOLDEN)[:, None]
    low, high = ((keys & 0x7FFFFFFF).int(), (_shift_right(keys, 33)).int())
    bits = torch.arange(vocabulary, dtype=torch.int32, device=seeds.device) * TOKEN_STRIDE + low
    scratch = torch.empty_like(bits)
    _xor_shifted_(bits, 16, scratch).mul_(TOKEN_MULTIPLIERS[0]).bitwise_xor_(high)
    _xor_shifted_(bits, 15, scratch).mul_(TOKEN_MULTIPLIERS[1])
    return _xor_shifted_(bits, 16, scratch)


def _xor_shifted_(bits: Tensor, count: int, scratch: Tensor) -> Tensor:
    """bits ^= bits >> count, logically, on int32."""
    torch.bitwise_right_shift(bits, count, out=scratch)
    return bits.bitwise_xor_(scratch.bitwise_and_((1 << (32 - count)) - 1))


def negative_clocks(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """[B, V] float32: minus a standard exponential number for every token.

    31 bits become u in (0, 1) with full relative precision near 0, where races are won; -log(1 - u)
    is then the exponential. The factor keeps u below 1 when the conversion rounds up.
    """
    uniform = token_bits(seeds, positions, vocabulary).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    return uniform.add_(0.5).mul_(-(1 - 2.0**-23) * 2.0**-31).log1p_()


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of a batch, one row per sequence. What decides which code runs lies on
    the host, so asking never waits for the device."""

    seeds: Tensor  # [B] int64
    temperatures: Tensor  # [B, 1] float32, 1 for greedy rows
    greedy: Tensor  # [B] bool
    any_greedy: bool
    all_greedy: bool
    filtered: Tensor | None  # [F] int64, rows with top-k or top-p
    top_p: Tensor  # [F, 1] float64
    top_k: Tensor  # [F, 1] int64

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> SamplingRows:
        samplings = [request.sampling for request in requests]
        greedy = [s.temperature == 0 for s in samplings]
        filtered = [i for i, s in enumerate(samplings) if s.is_filtered]
        chosen = [samplings[i] for i in filtered]
        no_limit = torch.iinfo(torch.int64).max

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        return cls(
            seeds=column([signed(request.seed) for request in requests], torch.int64),
            temperatures=column([s.temperature or 1.0 for s in samplings], torch.float32)[:, None],
            greedy=column(greedy, torch.bool),
            any_greedy=any(greedy),
            all_greedy=all(greedy),
            filtered=column(filtered, torch.int64) if filtered else None,
            top_p=column([s.top_p for s in chosen], torch.float64)[:, None],
            top_k=column([s.top_k or no_limit for s in chosen], torch.int64)[:, None],
        )


def sample(logits: Tensor, rows: SamplingRows, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] from logits [B, V]; ``positions`` are where the tokens will stand.

    Log-probs are those of the tempered distribution before top-k and top-p: what the trainer computes.
    """
    log_probs = tempered(logits, rows.temperatures)
    if rows.all_greedy:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = draw(log_probs, rows, positions)
        if rows.any_greedy:
            tokens = torch.where(rows.greedy, logits.argmax(dim=-1), tokens)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def tempered(logits: Tensor, temperatures: Tensor | float) -> Tensor:
    """Log-probs at a temperature, in float32."""
    return torch.log_softmax(logits.float() / temperatures, dim=-1)


def draw(log_probs: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """Tokens [B] for ``positions`` from log-probs [B, V], for rows that are not greedy."""
    weights = log_probs.exp()
    if rows.filtered is not None:
        weights[rows.filtered] *= keep_mask(log_probs[rows.filtered], rows.top_k, rows.top_p)
    return _race(weights, rows.seeds, positions)


def draw_tokens(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """`draw` where nothing is filtered."""
    return _race(log_probs.exp(), seeds, positions)


def _race(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The first clock to ring has the largest rate / time; clocks are negative, hence the smallest."""
    return weights.div_(negative_clocks(seeds, positions, weights.shape[-1])).argmin(dim=-1)


def keep_mask(log_probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[F, V] bool: the ``top_k`` likeliest tokens, and of those, renormalised, the fewest whose
    probability reaches ``top_p``; always at least one. Ties go to the smaller id."""
    ordered, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    in_top_k = torch.arange(ordered.shape[-1], device=ordered.device) < top_k
    probs = ordered.double().exp() * in_top_k
    before = probs.cumsum(dim=-1) - probs
    kept = in_top_k & (before < top_p * probs.sum(dim=-1, keepdim=True))
    return torch.zeros_like(kept).scatter_(-1, ids, kept)
