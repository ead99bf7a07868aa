"""Verifiers: from a problem and a response to a score, safely.

Names are resolved on first use: a worker process imports this package too, and starts sooner without the rest of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luffy.rewards.extract import after_thought
    from luffy.rewards.pool import Outcome, WorkerPool
    from luffy.rewards.scores import ScoreSummary, score_file
    from luffy.rewards.verifier import Verifier, build_verifier

__all__ = ["Outcome", "ScoreSummary", "Verifier", "WorkerPool", "after_thought", "build_verifier", "score_file"]

_HOMES = {
    "Outcome": "pool",
    "ScoreSummary": "scores",
    "Verifier": "verifier",
    "WorkerPool": "pool",
    "after_thought": "extract",
    "build_verifier": "verifier",
    "score_file": "scores",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
