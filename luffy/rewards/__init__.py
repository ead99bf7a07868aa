"""Verifiers: from a problem and a response to a score, safely.

They are resolved on first use: a worker process imports this package too, and starts sooner without them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luffy.rewards.extract import after_thought
    from luffy.rewards.verifier import Verifier, build_verifier

__all__ = ["Verifier", "after_thought", "build_verifier"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.verifier"), name)
