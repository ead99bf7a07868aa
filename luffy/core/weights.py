"""The weight of a trace token: the factor w of A * grad log p, by the name of a method or of a shape."""

from __future__ import annotations

from torch import Tensor

from luffy.core.shaping import Shape, log_prob_slope


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
        return Shape(f"p_div_p_{knobs.pop('gamma', 0.1)!r}", **knobs)
    return Shape({"mixed": "no_reshape", "sft": "logp"}.get(name, name), **knobs)
