"""The weight of a trace token: the factor w of A * grad log p, by the name of a method or of a shape."""

from __future__ import annotations

from torch import Tensor

from luffy.core.shaping import Shape, log_prob_slope


def trace_weight(
    name: str, log_p: Tensor, log_p_old: Tensor | None = None, log_q: Tensor | None = None, **knobs: float
) -> Tensor:
    """w of each token, in the shape of ``log_p``: the derivative in log p of the f that the loss takes.

    ``log_p``, ``log_p_old`` and ``log_q`` are log-probs under the policy, under the policy before the update (None: as
    it is now) and under whoever wrote the token (None: probability 1).

    | name | w | knobs |
    |---|---|---|
    | luffy | gamma p / (p + gamma)^2 | gamma (0.1) |
    | mixed | p | |
    | sft | 1 | |
    | chord_phi | p (1 - p) | |
    | trapo | min(1, p / gamma) | gamma (0.1) |
    | rl_plus | 2 p / (1.5 p_old + 0.5) * (1 - p)^pow_exp | pow_exp (0.5) |
    | exgrpo | gamma r / (r + gamma)^2, r = p / q | gamma (0.1) |
    | any shape of ``algorithm.off_policy_reshape`` | its derivative | weight, pow_exp, gamma |
    """
    return log_prob_slope(shape_of_method(name, **knobs), log_p, log_p_old, log_q)


def shape_of_method(name: str, **knobs: float) -> Shape:
    """The shape that a method of this name has on trace tokens; any other name is that of a shape."""
    if name == "luffy":
        return Shape(f"p_div_p_{knobs.pop('gamma', 0.1)!r}", **knobs)
    return Shape({"mixed": "no_reshape", "sft": "logp"}.get(name, name), **knobs)
