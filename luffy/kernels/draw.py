"""A whole sampling step on the device: the race of `luffy.rollout.sampling`, its log-prob, and what comes next.

The same noise for the same (seed, position, token) as there, so a response does not depend on which of
the two drew it, rounding aside. Logits are read once and never copied to float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _clocks(seed, position, token):
    """A standard exponential number for every token."""
    key = _mixed(_mixed(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    low, high = (key & 0x7FFFFFFF).to(tl.uint32), (key >> 33).to(tl.uint32)
    bits = token.to(tl.uint32) * 0x9E3779B1 + low
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) ^ high
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    u = (bits.to(tl.float32) + 0.5) * 4.65661231796588e-10  # (1 - 2^-23) / 2^31
    # -log(1 - u): the logarithm loses its digits near 1, where races are won, so there a series.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * 0.16666667)))))
    return tl.where(u < 0.0625, series, -tl.log(1.0 - u))


@triton.jit
def _race(
    logits, seeds, positions, temperatures, greedy, tops, sums, best, best_id, best_z, vocabulary, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One stretch of one row: largest logit, sum of exponentials, and the winner of the race."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    raw = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    z = raw / temperature
    top = tl.max(z, axis=0)
    # A stretch without a finite logit would give NaN; real NaNs must stay NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(z - shift)
    is_greedy = tl.load(greedy + row) != 0
    clock = _clocks(tl.load(seeds + row), tl.load(positions + row) + 1, token)
    score = tl.where(inside, tl.where(is_greedy, z, weight / clock), float("-inf"))
    highest, winner = tl.max(score, axis=0, return_indices=True)
    # Comparisons with NaN are all false, and the winner among them may be anything: keep it inside.
    chosen = tl.minimum(block * BLOCK + winner, vocabulary - 1)
    slot = row * blocks + block
    tl.store(tops + slot, top)
    tl.store(sums + slot, tl.sum(weight, axis=0))
    tl.store(best + slot, tl.where(is_greedy, highest, shift + tl.log(highest)))
    tl.store(best_id + slot, chosen)
    tl.store(best_z + slot, tl.load(logits + row * vocabulary + chosen).to(tl.float32) / temperature)


@triton.jit
def _finish(
    tops, sums, best, best_id, best_z, tokens, positions, limits, step, all_tokens, all_log_probs, stride, blocks,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row: the winner of its stretches is the next token, recorded under the number of the step."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    inside = at < blocks
    slot = row * blocks + at
    top = tl.load(tops + slot, mask=inside, other=float("-inf"))
    peak = tl.max(top, axis=0)
    parts = tl.load(sums + slot, mask=inside, other=0.0)
    parts = tl.where(top == float("-inf"), 0.0, parts * tl.exp(top - peak))
    log_total = peak + tl.log(tl.sum(parts, axis=0))
    winner = tl.minimum(tl.argmax(tl.load(best + slot, mask=inside, other=float("-inf")), axis=0), blocks - 1)
    token = tl.load(best_id + row * blocks + winner)
    log_prob = tl.load(best_z + row * blocks + winner) - log_total
    record = tl.load(step) * stride + row
    tl.store(all_tokens + record, token)
    tl.store(all_log_probs + record, log_prob)
    tl.store(tokens + row, token)
    position = tl.load(positions + row)
    tl.store(positions + row, tl.minimum(position + 1, tl.load(limits + row)))


def sample_and_advance(
    logits: Tensor, seeds: Tensor, temperatures: Tensor, greedy: Tensor, tokens: Tensor, positions: Tensor,
    limits: Tensor, step: Tensor, all_tokens: Tensor, all_log_probs: Tensor,
) -> None:  # fmt: skip
    """Draw the token after each row's newest one, which stands at ``positions``; put it into ``tokens``,
    move ``positions`` on (never beyond ``limits``) and record token and log-prob in row ``step``."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    tops, sums, best, best_z = logits.new_empty(4, rows, blocks, dtype=torch.float32)
    best_id = logits.new_empty(rows, blocks, dtype=torch.int64)
    _race[(rows, blocks)](
        logits, seeds, positions, temperatures, greedy, tops, sums, best, best_id, best_z, vocabulary, blocks,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _finish[(rows,)](
        tops, sums, best, best_id, best_z, tokens, positions, limits, step, all_tokens, all_log_probs,
        all_tokens.stride(0), blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1,
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
