"""Policy shaping: f(ratio) for both terms of the objective (paper section 3.2).

Every shape is computed from log-probs, so that a probability that underflows still has a finite
gradient: a root is ``exp(logp / 2)``, and ``p / (p + A)`` is ``sigmoid(logp - log A)``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KNOWN = ("no_reshape", "logp", "p_logp", "square_root", "pow", "p_div_p_<A>")
_P_DIV_P = re.compile(r"p_div_p_(?P<a>[0-9.eE+-]+)")


@dataclass(frozen=True)
class Shape:
    """A named shaping function with its two parameters, e.g. ``Shape("p_div_p_0.1")`` (the paper's)."""

    name: str = "no_reshape"
    weight: float = 1.0
    pow_exp: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in _OFF_POLICY:
            gamma_of(self.name)

    def off_policy(self, log_prob: Tensor) -> Tensor:
        """f(p) of a teacher's token: the ratio p / 1, the teacher's probability taken as 1."""
        if self.name in _OFF_POLICY:
            return _OFF_POLICY[self.name](log_prob, self)
        return torch.sigmoid(log_prob - math.log(gamma_of(self.name)))

    def on_policy(self, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
        """The same shape of the ratio p / p_old of the policy's own token."""
        if self.name == "logp":
            return log_prob - old_log_prob
        if self.name in _OFF_POLICY:
            return _OFF_POLICY[self.name](log_prob - old_log_prob, self)
        log_gamma = math.log(gamma_of(self.name))
        log_f = torch.nn.functional.logsigmoid
        return torch.exp(log_f(log_prob - log_gamma) - log_f(old_log_prob - log_gamma))


_OFF_POLICY: dict[str, Callable[[Tensor, Shape], Tensor]] = {
    "no_reshape": lambda log_r, shape: torch.exp(log_r),
    "logp": lambda log_r, shape: shape.weight * log_r,
    "p_logp": lambda log_r, shape: torch.exp(log_r) + shape.weight * log_r,
    "square_root": lambda log_r, shape: torch.exp(0.5 * log_r),
    "pow": lambda log_r, shape: torch.exp(shape.pow_exp * log_r),
}


def gamma_of(name: str) -> float:
    """The A of ``p_div_p_A``; any other name is unknown."""
    match = _P_DIV_P.fullmatch(name)
    try:
        gamma = float(match["a"]) if match else math.nan
    except ValueError:
        gamma = math.nan
    if not (gamma > 0 and math.isfinite(gamma)):
        raise ValueError(f"unknown reshape {name!r}; known: {', '.join(KNOWN)} with any positive A")
    return gamma


def gradient_weight(prob: Tensor, shape: Shape) -> Tensor:
    """|d f(p) / d logit| of the token itself: f'(p) * p * (1 - p) (Eq. 8; Figure 2 right)."""
    with torch.enable_grad():
        log_prob = prob.log().detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(shape.off_policy(log_prob).sum(), log_prob)
    return slope * (1 - prob)
