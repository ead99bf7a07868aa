"""Engines: token ids in, token ids and log-probs out."""

from luffy.rollout.engine import Engine
from luffy.rollout.native import EngineStats, NativeEngine

__all__ = ["Engine", "EngineStats", "NativeEngine"]
