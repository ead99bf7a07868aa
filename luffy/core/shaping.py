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

import torch
from torch import Tensor

from luffy.errors import UserError
from luffy.registry import Registry

_P_DIV_P = re.compile(r"p_div_p_(?P<a>[0-9.eE+-]+)")


@dataclass(frozen=True)
class Shape:
    """A named shaping function with its parameters, e.g. ``Shape("p_div_p_0.1")`` (the paper's)."""

    name: str = "no_reshape"
    weight: float = 1.0
    pow_exp: float = 0.5
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _check_gamma(self.gamma)
        known = self.name in SHAPES or self.name in COMPARED_SHAPES
        if not known and ":" not in self.name:  # a user's module is imported on first use, not here
            gamma_of(self.name)

    def off_policy(
        self, log_prob: Tensor, old_log_prob: Tensor | None = None, behavior_log_prob: Tensor | None = None
    ) -> Tensor:
        """f of a token that the policy did not write, from its log-probs under the policy now, under the policy before
        the update (None: as it is now) and under whoever wrote it (None: probability 1). Most shapes are of p alone:
        the ratio p / 1, the teacher's probability taken as 1."""
        if self.name in COMPARED_SHAPES:
            old = log_prob.detach() if old_log_prob is None else old_log_prob
            behavior = torch.zeros_like(old) if behavior_log_prob is None else behavior_log_prob
            return COMPARED_SHAPES[self.name](log_prob, old, behavior, self)
        if _P_DIV_P.fullmatch(self.name):
            return torch.sigmoid(log_prob - math.log(gamma_of(self.name)))
        return SHAPES[self.name](log_prob, self)

    def on_policy(self, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
        """The same shape of the ratio p / p_old of the policy's own token."""
        if self.name in RATIO_SHAPES:
            return RATIO_SHAPES[self.name](log_prob - old_log_prob, self)
        log_gamma = math.log(gamma_of(self.name))
        log_f = torch.nn.functional.logsigmoid
        return torch.exp(log_f(log_prob - log_gamma) - log_f(old_log_prob - log_gamma))

    def require_ratios(self) -> None:
        """A shape of a probability may not be defined for a ratio, which can exceed 1: only one that was registered
        for ratios too serves the policy's own tokens."""
        if self.name not in RATIO_SHAPES and not _P_DIV_P.fullmatch(self.name):
            known = ", ".join([*RATIO_SHAPES, "p_div_p_<A>"])
            raise UserError(
                f"'algorithm.on_policy_reshape' {self.name} shapes a teacher's probability, not the policy's ratio, "
                f"which can exceed 1; take one of {known}"
            )


ShapeFunction = Callable[[Tensor, Shape], Tensor]
ComparedShape = Callable[[Tensor, Tensor, Tensor, Shape], Tensor]
SHAPES: Registry[ShapeFunction] = Registry("shape")  # f(p) of a teacher's token, from log p
COMPARED_SHAPES: Registry[ComparedShape] = Registry("shape")  # f(p, p_old, q), from their logs
RATIO_SHAPES: Registry[ShapeFunction] = Registry("shape of ratios")  # f(p / p_old), from the log of the ratio


def shape(name: str, *, ratios: bool = False) -> Callable[[ShapeFunction], ShapeFunction]:
    """A decorator that registers a shape for ``algorithm.off_policy_reshape``.

    ``function(log_p, shape)`` returns f(p) of teacher tokens, in the shape of ``log_p``, their log-probs under the
    policy; ``shape.weight``, ``shape.pow_exp`` and ``shape.gamma`` are its knobs. ``ratios``: it is also defined
    for the logs of ratios p / p_old, which can exceed 0, and may be named in ``algorithm.on_policy_reshape``.
    """

    def register(function: ShapeFunction) -> ShapeFunction:
        if ratios:
            RATIO_SHAPES.register(name)(function)
        return SHAPES.register(name)(function)

    return register


def compared_shape(name: str) -> Callable[[ComparedShape], ComparedShape]:
    """A decorator that registers a shape of three probabilities for ``algorithm.off_policy_reshape``.

    ``function(log_p, log_p_old, log_q, shape)``: the log-probs of tokens under the policy, under the policy before the
    update, and under whoever wrote them; ``shape`` has the knobs ``weight``, ``pow_exp`` and ``gamma``.
    """
    return COMPARED_SHAPES.register(name)


@shape("no_reshape", ratios=True)
def _no_reshape(log_r: Tensor, shape: Shape) -> Tensor:
    return torch.exp(log_r)


@shape("logp")
def _logp(log_p: Tensor, shape: Shape) -> Tensor:
    return shape.weight * log_p


@RATIO_SHAPES.register("logp")
def _log_ratio(log_r: Tensor, shape: Shape) -> Tensor:
    return log_r


@shape("p_logp", ratios=True)
def _p_logp(log_r: Tensor, shape: Shape) -> Tensor:
    return torch.exp(log_r) + shape.weight * log_r


@shape("square_root", ratios=True)
def _square_root(log_r: Tensor, shape: Shape) -> Tensor:
    return torch.exp(0.5 * log_r)


@shape("pow", ratios=True)
def _pow(log_r: Tensor, shape: Shape) -> Tensor:
    return torch.exp(shape.pow_exp * log_r)


@shape("chord_phi")
def _chord_phi(log_p: Tensor, shape: Shape) -> Tensor:
    """p - p^2 / 2, whose derivative in log p is p (1 - p) (CHORD's phi)."""
    p = torch.exp(log_p)
    return p - 0.5 * p * p


@shape("trapo")
def _trapo(log_p: Tensor, shape: Shape) -> Tensor:
    """p / gamma, and from p = gamma on 1 + log(p / gamma): the derivative in log p is min(1, p / gamma) (TRAPO)."""
    log_r = log_p - math.log(shape.gamma)
    return torch.where(log_r < 0, torch.exp(log_r.clamp(max=0.0)), 1 + log_r)


@compared_shape("rl_plus")
def _rl_plus(log_p: Tensor, log_p_old: Tensor, log_q: Tensor, shape: Shape) -> Tensor:
    """2 p / (1.5 p_old + 0.5), times (1 - p)^pow_exp without a gradient (RL-PLUS). The denominator is that of multiple
    importance sampling, p_old + p_teacher, with p_teacher estimated as (p_old + 1) / 2."""
    ratio = 2 * torch.exp(log_p) / (1.5 * torch.exp(log_p_old) + 0.5)
    return ratio * (-torch.expm1(log_p.detach().clamp(max=0.0))) ** shape.pow_exp


@compared_shape("exgrpo")
def _exgrpo(log_p: Tensor, log_p_old: Tensor, log_q: Tensor, shape: Shape) -> Tensor:
    """r / (r + gamma) with r = p / q (ExGRPO): LUFFY's shape of the ratio to the policy that wrote the token."""
    return torch.sigmoid(log_p - log_q - math.log(shape.gamma))


def _check_gamma(gamma: float) -> None:
    if not isinstance(gamma, int | float) or not 0 < gamma <= sys.float_info.max:
        raise UserError(f"gamma of a shape must be a number above 0, got {gamma!r:.40}")


def gamma_of(name: str) -> float:
    """The A of ``p_div_p_A``; any other name is unknown."""
    match = _P_DIV_P.fullmatch(name)
    try:
        gamma = float(match["a"]) if match else math.nan
    except ValueError:
        gamma = math.nan
    if not (gamma > 0 and math.isfinite(gamma)):
        known = ", ".join([*SHAPES, *COMPARED_SHAPES, "p_div_p_<A>"])
        raise UserError(f"unknown reshape {name!r}; known: {known} with any positive A, or module:function of your own")
    return gamma


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
    """w = df / d log p of each token, in the shape of ``log_p``, for the f of a method (luffy, mixed, sft) or any shape
    (docs/methods.md#shaping-functions).

    ``log_p``, ``log_p_old`` and ``log_q`` are log-probs under the policy, under the policy before the update (None: as
    it is now) and under the author of the token (None: probability 1). ``knobs``: weight, pow_exp, gamma of the shape.
    """
    return log_prob_slope(shape_of_method(name, **knobs), log_p, log_p_old, log_q)


def shape_of_method(name: str, **knobs: float) -> Shape:
    """The shape that a method of this name has on trace tokens; any other name is that of a shape."""
    if name == "luffy":
        gamma = knobs.pop("gamma", 0.1)
        _check_gamma(gamma)
        return Shape(f"p_div_p_{float(gamma)!r}", **knobs)
    return Shape({"mixed": "no_reshape", "sft": "logp"}.get(name, name), **knobs)
