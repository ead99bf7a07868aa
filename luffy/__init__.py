"""luffy: reinforcement learning with verifiable rewards under off-policy guidance.

``luffy.api`` has what a script or notebook needs; the three functions are the published ones of the paper's code. All
are found on first use: a verifier process imports this package too, and must not load torch to compare two formulas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from luffy._version import __version__

if TYPE_CHECKING:
    from luffy import api
    from luffy.core.advantages import compute_grpo_outcome_advantage_split
    from luffy.core.losses import compute_sft_pure_loss, compute_token_on_off_policy_loss

__all__ = [
    "__version__",
    "api",
    "compute_grpo_outcome_advantage_split",
    "compute_sft_pure_loss",
    "compute_token_on_off_policy_loss",
]

_HOMES = {
    "compute_grpo_outcome_advantage_split": "luffy.core.advantages",
    "compute_sft_pure_loss": "luffy.core.losses",
    "compute_token_on_off_policy_loss": "luffy.core.losses",
}


def __getattr__(name: str) -> Any:
    if name == "api":
        return import_module("luffy.api")
    if name not in _HOMES:
        raise AttributeError(f"module 'luffy' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
