"""When a second model overrides the policy's token, and the exact probability of what comes out.

The policy (the draft, d) proposes a token; a rule keeps it, or draws another with the help of the second
model (g). The distribution that a token is really drawn from is the behaviour b:

    speculative     keep x with min(1, g(x) / d(x)), else draw from (g - d)+      b = g
    threshold(tau)  keep x where g(x) >= tau, else draw from g                    b = d [g >= tau] + D g
                                                                                  D = sum of d over g < tau
    mixture(eps)    draw from g with probability eps, keep x otherwise            b = (1 - eps) d + eps g

Everything is computed from log-probs, so that a probability that underflows gives -inf and never NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RULES = ("speculative", "threshold", "mixture")


@dataclass(frozen=True)
class Rule:
    """A named rule with its parameter: ``tau`` is read by threshold alone, ``eps`` by mixture alone.

    ``log_d`` and ``log_g`` are normalised log-probs [..., V]; tokens are [...].
    """

    name: str
    tau: float = 0.1
    eps: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ValueError(f"unknown override rule {self.name!r}; known: {', '.join(RULES)}")
        for field, value in (("tau", self.tau), ("eps", self.eps)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{field} is {value}: a probability lies between 0 and 1")

    def accept_probability(self, log_d: Tensor, log_g: Tensor, proposals: Tensor) -> Tensor:
        """[...]: how likely a proposed token stays."""
        if self.name == "mixture":
            return torch.full_like(proposals, 1.0 - self.eps, dtype=log_d.dtype)
        chosen_g = _at(log_g, proposals)
        if self.name == "threshold":
            return (chosen_g >= _log(self.tau)).to(log_d.dtype)
        ratio = (chosen_g - _at(log_d, proposals)).clamp(max=0.0)
        # -inf minus -inf is NaN; what the second model never says is never kept.
        return ratio.masked_fill(chosen_g == -math.inf, -math.inf).exp()

    def override_log_probs(self, log_d: Tensor, log_g: Tensor) -> Tensor:
        """[..., V], normalised: what a token that takes a rejected one's place is drawn from."""
        if self.name != "speculative":
            return log_g
        excess = torch.log(-torch.expm1((log_d - log_g).clamp(max=0.0)))
        log_r = torch.where(log_g > log_d, log_g + excess, -math.inf)
        total = torch.logsumexp(log_r, dim=-1, keepdim=True)
        # Without a residual g = d: only rounding can have rejected, and g is what is owed.
        return torch.where(total == -math.inf, log_g, log_r - total)

    def behavior_log_probs(self, log_d: Tensor, log_g: Tensor, tokens: Tensor) -> Tensor:
        """[...]: log b of ``tokens``, however they came about."""
        chosen_g = _at(log_g, tokens)
        if self.name == "speculative":
            return chosen_g
        chosen_d = _at(log_d, tokens)
        if self.name == "mixture":
            return torch.logaddexp(_log(1.0 - self.eps) + chosen_d, _log(self.eps) + chosen_g)
        log_tau = _log(self.tau)
        log_rejected = torch.logsumexp(log_d.masked_fill(log_g >= log_tau, -math.inf), dim=-1)
        kept = chosen_d.masked_fill(chosen_g < log_tau, -math.inf)
        return torch.logaddexp(kept, log_rejected + chosen_g)


def _at(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0.0 else -math.inf
