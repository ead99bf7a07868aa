"""Policy shaping: f(ratio) for both terms of the objective (paper section 3.2).

Every shape is computed from log-probs, so that a probability that underflows still has a finite
gradient: a root is ``exp(logp / 2)``, and ``p / (p + A)`` is ``sigmoid(logp - log A)``.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from luffy.errors import UserError
from luffy.registry import NoSettings, OldSetting, Part, Registry
from luffy.schema import Chosen, knob

_P_DIV_P = re.compile(r"p_div_p_(?P<gamma>[0-9.eE+-]+)")


@dataclass(frozen=True)
class ShapeSettings:
    """What a shape without settings of its own reads."""

    weight: float = knob(1.0, "factor of log p")
    pow_exp: float = knob(0.5, "exponent")
    gamma: float = knob(0.1, "gamma", gt=0)


@dataclass(frozen=True)
class Weight:
    """Settings of shapes with a factor."""

    weight: float = knob(1.0, "factor of log p")


@dataclass(frozen=True)
class Exponent:
    """Settings of shapes with an exponent."""

    pow_exp: float = knob(0.5, "exponent of p; in rl_plus of 1 - p")


@dataclass(frozen=True)
class Gamma:
    """Settings of p / (p + gamma) and shapes like it."""

    gamma: float = knob(0.1, "probability below which a token's weight begins to fall", gt=0)


@dataclass(frozen=True)
class Clip:
    """Settings of a clipped ratio."""

    clip: float = knob(0.2, "the ratio p / p_old is clipped at 1 + this", gt=0)


@dataclass(frozen=True)
class ShapeFunction(Part):
    """f(p) of a teacher's token. ``compared``: f(p, p_old, q), which divides by probabilities itself. ``on_policy``:
    the same of an own token, from log p and log p_old; None: not defined for ratios, which can exceed 1."""

    settings: type = ShapeSettings
    compared: bool = False
    on_policy: Callable[[Tensor, Tensor, Any], Tensor] | None = None


def _spelled(name: str) -> dict[str, Any] | None:
    """``p_div_p_0.1`` is p_div_p with gamma 0.1."""
    match = _P_DIV_P.fullmatch(name)
    try:
        gamma = float(match["gamma"]) if match else math.nan
    except ValueError:
        return None
    return {"name": "p_div_p", "gamma": gamma} if 0 < gamma < math.inf else None


SHAPES: Registry[ShapeFunction] = Registry("shape", ShapeFunction, spelled=_spelled)


@dataclass(frozen=True, init=False)
class Shape:
    """A shaping function with its settings, e.g. ``Shape("p_div_p", gamma=0.1)`` (the paper's; ``p_div_p_0.1`` is the
    same). ``weight``, ``pow_exp`` and ``gamma`` count if the function has them."""

    chosen: Chosen

    def __init__(
        self, name: str = "no_reshape", weight: float = 1.0, pow_exp: float = 0.5, gamma: float = 0.1, **settings: Any
    ) -> None:
        if not isinstance(gamma, int | float) or not 0 < gamma <= sys.float_info.max:
            endless = isinstance(gamma, int) and abs(gamma) > sys.float_info.max  # Python may refuse to write it
            got = "one beyond all floats" if endless else f"{gamma!r:.40}"
            raise UserError(f"gamma of a shape must be a number above 0, got {got}")
        old = {"weight": weight, "pow_exp": pow_exp, "gamma": gamma}
        given = {key: OldSetting(value) for key, value in old.items()} | settings
        chosen = name if isinstance(name, Chosen) else SHAPES.read({"name": name, **given}, "")
        object.__setattr__(self, "chosen", chosen)

    @property
    def compares(self) -> bool:
        """Whether it compares with the policy before the update and with the token's author."""
        return bool(self.chosen.part.compared)

    def off_policy(
        self, log_prob: Tensor, old_log_prob: Tensor | None = None, behavior_log_prob: Tensor | None = None
    ) -> Tensor:
        """f of a token that the policy did not write, from its log-probs under the policy now, under the policy before
        the update (None: as it is now) and under the token's author (None: probability 1). Most shapes are of p alone:
        the ratio p / 1, the teacher's probability taken as 1."""
        function = SHAPES[self.chosen]
        if not function.compared:
            return function(log_prob, self.chosen.settings)  # type: ignore[no-any-return]
        old = log_prob.detach() if old_log_prob is None else old_log_prob
        behavior = torch.zeros_like(old) if behavior_log_prob is None else behavior_log_prob
        return function(log_prob, old, behavior, self.chosen.settings)  # type: ignore[no-any-return]

    def on_policy(self, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
        """The same shape of the ratio p / p_old of the policy's own token."""
        on_policy = self.chosen.part.on_policy
        assert on_policy is not None
        return on_policy(log_prob, old_log_prob, self.chosen.settings)  # type: ignore[no-any-return]

    def require_ratios(self) -> None:
        """A shape of a probability may not be defined for a ratio, which can exceed 1: only one that was registered
        for ratios too serves the policy's own tokens."""
        if self.chosen.part.on_policy is None:
            known = ", ".join(name for name, part in SHAPES.entries.items() if part.on_policy)
            raise UserError(
                f"'algorithm.on_policy_reshape' {self.chosen} shapes a teacher's probability, not the policy's ratio, "
                f"which can exceed 1; take one of {known}"
            )


Function = Callable[..., Tensor]


def shape(name: str, *, ratios: bool = False, settings: type = ShapeSettings) -> Callable[[Function], Function]:
    """Register a shape for ``algorithm.off_policy_reshape``.

    ``function(log_p, settings)`` returns f(p), in the tensor shape of ``log_p``. Default settings: ``weight``,
    ``pow_exp``, ``gamma``. ``ratios``: f is also defined above 1, so ``algorithm.on_policy_reshape`` may name it.
    """

    def register(function: Function) -> Function:
        def on_policy(log_p: Tensor, log_p_old: Tensor, settings: Any) -> Tensor:
            return function(log_p - log_p_old, settings)

        part = ShapeFunction(function, settings, on_policy=on_policy if ratios else None)
        SHAPES.register(name)(part)
        return function

    return register


def compared_shape(name: str, settings: type = ShapeSettings) -> Callable[[Function], Function]:
    """Register a shape of three probabilities for ``algorithm.off_policy_reshape``.

    ``function(log_p, log_p_old, log_q, settings)``: log-probs of tokens under the policy, the old policy and the
    tokens' author.
    """
    return SHAPES.register(name, settings=settings, compared=True)


@shape("no_reshape", ratios=True, settings=NoSettings)
def _no_reshape(log_r: Tensor, settings: NoSettings) -> Tensor:
    return torch.exp(log_r)


@SHAPES.register("logp", settings=Weight, on_policy=lambda log_p, log_p_old, settings: log_p - log_p_old)
def _logp(log_p: Tensor, settings: Weight) -> Tensor:
    return settings.weight * log_p


@shape("p_logp", ratios=True, settings=Weight)
def _p_logp(log_r: Tensor, settings: Weight) -> Tensor:
    return torch.exp(log_r) + settings.weight * log_r


@shape("square_root", ratios=True, settings=NoSettings)
def _square_root(log_r: Tensor, settings: NoSettings) -> Tensor:
    return torch.exp(0.5 * log_r)


@shape("pow", ratios=True, settings=Exponent)
def _pow(log_r: Tensor, settings: Exponent) -> Tensor:
    return torch.exp(settings.pow_exp * log_r)


def _p_div_p_ratio(log_p: Tensor, log_p_old: Tensor, settings: Gamma) -> Tensor:
    """f(p) / f(p_old)."""
    log_gamma, log_f = math.log(settings.gamma), torch.nn.functional.logsigmoid
    return torch.exp(log_f(log_p - log_gamma) - log_f(log_p_old - log_gamma))


@SHAPES.register("p_div_p", settings=Gamma, on_policy=_p_div_p_ratio)
def _p_div_p(log_p: Tensor, settings: Gamma) -> Tensor:
    """p / (p + gamma), LUFFY's policy shaping."""
    return torch.sigmoid(log_p - math.log(settings.gamma))


@shape("chord_phi", settings=NoSettings)
def _chord_phi(log_p: Tensor, settings: NoSettings) -> Tensor:
    """p - p^2 / 2, whose derivative in log p is p (1 - p) (CHORD's phi)."""
    p = torch.exp(log_p)
    return p - 0.5 * p * p


@shape("trapo", settings=Gamma)
def _trapo(log_p: Tensor, settings: Gamma) -> Tensor:
    """p / gamma, and from p = gamma on 1 + log(p / gamma): the derivative in log p is min(1, p / gamma) (TRAPO)."""
    log_r = log_p - math.log(settings.gamma)
    return torch.where(log_r < 0, torch.exp(log_r.clamp(max=0.0)), 1 + log_r)


@compared_shape("rl_plus", settings=Exponent)
def _rl_plus(log_p: Tensor, log_p_old: Tensor, log_q: Tensor, settings: Exponent) -> Tensor:
    """2 p / (1.5 p_old + 0.5), times (1 - p)^pow_exp without a gradient (RL-PLUS). The denominator is that of multiple
    importance sampling, p_old + p_teacher, with p_teacher estimated as (p_old + 1) / 2."""
    ratio = 2 * torch.exp(log_p) / (1.5 * torch.exp(log_p_old) + 0.5)
    return ratio * (-torch.expm1(log_p.detach().clamp(max=0.0))) ** settings.pow_exp


@compared_shape("exgrpo", settings=Gamma)
def _exgrpo(log_p: Tensor, log_p_old: Tensor, log_q: Tensor, settings: Gamma) -> Tensor:
    """r / (r + gamma) with r = p / q (ExGRPO): LUFFY's shape of the ratio to the policy that wrote the token."""
    return torch.sigmoid(log_p - log_q - math.log(settings.gamma))


@compared_shape("act_guide", settings=Gamma)
def _act_guide(log_p: Tensor, log_p_old: Tensor, log_q: Tensor, settings: Gamma) -> Tensor:
    """log(1 + r / gamma) with r = p / q, whose derivative in log p is r / (r + gamma) (ActGuide-RL)."""
    return torch.nn.functional.softplus(log_p - log_q - math.log(settings.gamma))


@compared_shape("psft", settings=Clip)
def _psft(log_p: Tensor, log_p_old: Tensor, log_q: Tensor, settings: Clip) -> Tensor:
    """min(r, clip(r, 1 -+ clip)) with r = p / p_old (PSFT): PPO's objective with an advantage of 1, so that only the
    upper bound acts."""
    return torch.exp(log_p - log_p_old).clamp(max=1 + settings.clip)


def log_prob_slope(
    shape: Shape, log_prob: Tensor, old_log_prob: Tensor | None = None, behavior_log_prob: Tensor | None = None
) -> Tensor:
    """d f / d log p of each token: the factor of A * grad log p in the gradient of the off-policy term."""
    with torch.enable_grad():
        current = log_prob.detach().requires_grad_(True)
        value = shape.off_policy(current, old_log_prob, behavior_log_prob)
        (slope,) = torch.autograd.grad(value.sum(), current)
    return slope


def gradient_weight(prob: Tensor, shape: Shape) -> Tensor:
    """|d f(p) / d logit| of the token itself: f'(p) * p * (1 - p) (Eq. 8; Figure 2 right)."""
    return log_prob_slope(shape, prob.log()) * (1 - prob)


def trace_weight(
    name: str, log_p: Tensor, log_p_old: Tensor | None = None, log_q: Tensor | None = None, **knobs: float
) -> Tensor:
    """w = df / d log p of each token, in the tensor shape of ``log_p``, for a method (luffy, mixed, sft) or shape.

    Log-probs are the policy's, the old policy's (None: the policy's) and the author's (None: probability 1).
    ``knobs``: weight, pow_exp, gamma of the shape.
    """
    return log_prob_slope(shape_of_method(name, **knobs), log_p, log_p_old, log_q)


def shape_of_method(name: str, **knobs: float) -> Shape:
    """The shape that a method of this name has on trace tokens; any other name is that of a shape."""
    return Shape({"luffy": "p_div_p", "mixed": "no_reshape", "sft": "logp"}.get(name, name), **knobs)
