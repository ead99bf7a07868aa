"""A user's own reward, ``module:function``, called inside a worker process."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from luffy.errors import UserError
from luffy.registry import resolve
from luffy.rewards.kinds import OwnReward

if TYPE_CHECKING:
    from luffy.types import Problem


def load(path: str) -> Callable[[str, str, Problem], tuple[float, str]]:
    """The user's function, checked once to take (response, answer, problem)."""
    function: OwnReward = resolve(path)
    require_three_arguments(path, function)

    def score(response: str, answer: str, problem: Problem) -> tuple[float, str]:
        return finite_number(path, function(response, answer, problem)), "ok"

    return score


def finite_number(path: str, value: object) -> float:
    """Anything that is a number (numpy and one-element tensors too), but no string and no NaN."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"{path} must return a number, found {type(value).__name__} {value!r:.80}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{path} must return a finite number, found {number}")
    return number


def require_three_arguments(path: str, function: OwnReward) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built into C, without a signature to read
        return
    try:
        signature.bind("response", "answer", "problem")
    except TypeError as error:
        raise UserError(
            f"{path}{signature} cannot be called as function(response, answer, problem): {error}"
        ) from error
