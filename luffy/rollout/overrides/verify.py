"""The rule's part of a round: keep proposals up to the first that is rejected, and replace that one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.core.override_rules import Rule
from luffy.rollout.overrides.propose import Draw
from luffy.rollout.sampling import token_bits

# Any two numbers far apart will do: the seeds are hashed after these are mixed in.
ACCEPT_STREAM = 0x2545F4914F6CDD1D
OVERRIDE_STREAM = 0x5851F42D4C957F2D


@dataclass(frozen=True, eq=False)
class Verified:
    """The tokens of a round of B x k proposals; of row i the first ``taken[i]`` count."""

    tokens: Tensor  # [B, k] long
    overrides: Tensor  # [B, k] bool
    taken: Tensor  # [B] long
    log_probs: Tensor  # [B, k] float32, the draft's
    behavior_log_probs: Tensor  # [B, k] float32
    guidance_log_probs: Tensor  # [B, k] float32

    def to_host(self, rows: int) -> list[list[list[float]]]:
        """Everything in one transfer (ids are exact in float64): [6][rows][k]."""
        parts = [self.tokens, self.overrides, self.taken[:, None].expand_as(self.tokens)]
        parts += [self.log_probs, self.behavior_log_probs, self.guidance_log_probs]
        numbers: list[list[list[float]]] = torch.stack([part[:rows].double() for part in parts]).tolist()
        return numbers


def verify(
    rule: Rule,
    proposals: Tensor,
    log_d: Tensor,
    log_g: Tensor,
    seeds: Tensor,
    positions: Tensor,
    may_override: Tensor,
    draw: Draw,
) -> Verified:
    """Keep the proposals [B, k] of every row up to the first the rule rejects, and replace that one.

    ``log_d`` (the draft's) and ``log_g`` (the second model's) are [B, k, V], ``positions`` [B, k] where the tokens will
    stand. Where ``may_override`` [B] is False, the row keeps every proposal.
    """
    count = proposals.shape[1]
    chance = rule.accept_probability(log_d, log_g, proposals)
    accepted = (uniforms(seeds ^ ACCEPT_STREAM, positions) < chance) | ~may_override[:, None]
    kept = accepted.long().cumprod(dim=1).sum(dim=1)
    # A row that keeps everything draws an override too, and drops it: to ask first would wait for the device.
    at = kept.clamp(max=count - 1)
    row = torch.arange(len(at), device=at.device)
    instead = rule.override_log_probs(log_d[row, at], log_g[row, at])
    drawn = draw(instead, seeds ^ OVERRIDE_STREAM, positions[row, at])
    overrides = torch.arange(count, device=at.device) == kept[:, None]
    tokens = torch.where(overrides, drawn[:, None], proposals)
    policy, second = (x.gather(-1, tokens[..., None]).squeeze(-1) for x in (log_d, log_g))
    behavior = torch.where(may_override[:, None], rule.behavior_log_probs(log_d, log_g, tokens), policy)
    return Verified(tokens, overrides, (kept + 1).clamp(max=count), policy, behavior, second)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """[B, k] float64 strictly between 0 and 1, so that probabilities 1 and 0 mean always and never."""
    flat = token_bits(seeds[:, None].expand(positions.shape).flatten(), positions.flatten(), 1)
    return ((flat & 0x7FFFFFFF).double() + 0.5).view(positions.shape) / 2**31
