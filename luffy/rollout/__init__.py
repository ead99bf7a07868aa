"""Engines: token ids in, token ids and log-probs out."""

from luffy.rollout.engine import Engine, EngineStats
from luffy.rollout.native import NativeEngine
from luffy.rollout.overrides.overriding_decoder import SpeculativeStats
from luffy.rollout.overrides.speculative import SpeculativeEngine
from luffy.rollout.overrides.turns import TurnsEngine

__all__ = [
    "Engine",
    "EngineStats",
    "NativeEngine",
    "SpeculativeEngine",
    "SpeculativeStats",
    "TurnsEngine",
]
