"""A whole sampling step on the device: the race of `luffy.rollout.sampling`, its log-prob, and what comes next.

The same noise for the same (seed, position, token) as there, so a response does not depend on which of
the two drew it, rounding aside. Logits are read once and never copied to float32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK, WARPS = 2048, 2
LOG_2, LOG2_E = tl.constexpr(math.log(2)), tl.constexpr(1 / math.log(2))
# Triton's own log2 takes some twenty instructions, but is all that its interpreter and other makers' GPUs have.
FAST = tl.constexpr(torch.version.cuda is not None and not triton.knobs.runtime.interpret)


@triton.jit
def _log2(x):
    """Logarithm to about 22 bits: absolute precision near x = 1, else relative."""
    return libdevice.fast_log2f(x) if FAST else tl.log2(x)


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _clocks(seed, position, token):
    """An exponential number of mean log2(e) for every token."""
    key = _mixed(_mixed(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    low, high = (key & 0x7FFFFFFF).to(tl.uint32), (key >> 33).to(tl.uint32)
    bits = token.to(tl.uint32) * 0x9E3779B1 + low
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15) ^ (high ^ (high >> 15))) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    step = 4.65661231796588e-10  # (1 - 2^-23) / 2^31
    u = bits.to(tl.float32) * step + 0.5 * step
    # -log2(1 - u): the logarithm loses its digits near 1, where races are won, so there a polynomial.
    near = u * (1.44269504 + u * (0.72136227 + u * (0.47949988 + u * 0.39811484)))
    return tl.where(u < 0.0625, near, -_log2(1.0 - u))


@triton.jit
def _leads(raw, scale, greedy, seed, position, token):
    """log2(rate / time) of tokens in the race; of a greedy row, its logits."""
    lead = raw
    if not greedy:
        lead = raw * scale - _log2(_clocks(seed, position, token))
    return lead


@triton.jit
def _race(
    logits, seeds, positions, temperatures, greedy, tops, sums, best, vocabulary, blocks, BLOCK: tl.constexpr
):  # fmt: skip
    """One stretch of one row: largest logit, sum of exponentials (both to base 2), and the largest lead."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    scale = LOG2_E / tl.load(temperatures + row)
    top = tl.max(raw, axis=0) * scale
    # A stretch without a finite logit would give NaN; real NaNs must stay NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(raw * scale - shift), axis=0)
    lead = _leads(raw, scale, tl.load(greedy + row) != 0, tl.load(seeds + row), tl.load(positions + row) + 1, token)
    slot = row * blocks + block
    tl.store(tops + slot, top)
    tl.store(sums + slot, total)
    tl.store(best + slot, tl.max(lead, axis=0))


@triton.jit
def _finish(
    logits, seeds, temperatures, greedy, tops, sums, best, tokens, positions, limits, step, all_tokens, all_log_probs,
    stride, vocabulary, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row: the winner of its best stretch is the next token, recorded under the number of the step."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    inside = at < blocks
    slot = row * blocks + at
    # Comparisons with NaN are all false, and the winner among them may be anything: keep it inside.
    block = tl.minimum(tl.argmax(tl.load(best + slot, mask=inside, other=float("-inf")), axis=0), blocks - 1)
    position, scale = tl.load(positions + row), LOG2_E / tl.load(temperatures + row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    lead = _leads(raw, scale, tl.load(greedy + row) != 0, tl.load(seeds + row), position + 1, token)
    winner = tl.minimum(block * BLOCK + tl.argmax(lead, axis=0), vocabulary - 1)
    top = tl.load(tops + slot, mask=inside, other=float("-inf"))
    peak = tl.max(top, axis=0)
    parts = tl.load(sums + slot, mask=inside, other=0.0)
    parts = tl.where(top == float("-inf"), 0.0, parts * tl.exp2(top - peak))
    chosen = tl.load(logits + row * vocabulary + winner).to(tl.float32)
    record = tl.load(step) * stride + row
    tl.store(all_tokens + record, winner)
    tl.store(all_log_probs + record, (chosen * scale - peak) * LOG_2 - tl.log(tl.sum(parts, axis=0)))
    tl.store(tokens + row, winner)
    tl.store(positions + row, tl.minimum(position + 1, tl.load(limits + row)))


def sample_and_advance(
    logits: Tensor, seeds: Tensor, temperatures: Tensor, greedy: Tensor, tokens: Tensor, positions: Tensor,
    limits: Tensor, step: Tensor, all_tokens: Tensor, all_log_probs: Tensor,
) -> None:  # fmt: skip
    """Draw the token after each row's newest one, which stands at ``positions``; put it into ``tokens``,
    move ``positions`` on (never beyond ``limits``) and record token and log-prob in row ``step``."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    tops, sums, best = logits.new_empty(3, rows, blocks, dtype=torch.float32)
    _race[(rows, blocks)](
        logits, seeds, positions, temperatures, greedy, tops, sums, best, vocabulary, blocks, BLOCK=BLOCK,
        num_warps=WARPS,
    )  # fmt: skip
    _finish[(rows,)](
        logits, seeds, temperatures, greedy, tops, sums, best, tokens, positions, limits, step, all_tokens,
        all_log_probs, all_tokens.stride(0), vocabulary, blocks, BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks),
        num_warps=8,
    )  # fmt: skip
    step.add_(1)


def draw_tokens(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Tokens [B] that will stand at ``positions``, from log-probs [B, V] in float32."""
    log_probs = log_probs.contiguous()
    rows = len(log_probs)
    tokens, drawn = log_probs.new_empty(2, rows, dtype=torch.int64)
    sample_and_advance(
        log_probs, seeds, log_probs.new_ones(rows), log_probs.new_zeros(rows, dtype=torch.bool), tokens, positions - 1,
        positions, log_probs.new_zeros(1, dtype=torch.int64), drawn[None], log_probs.new_empty(1, rows),
    )  # fmt: skip
    return tokens
