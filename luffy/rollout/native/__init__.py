"""The native engine: continuous batching on the policy's own weights, in the policy's own process."""

from luffy.rollout.native.drafts import Drafts
from luffy.rollout.native.native_engine import NativeEngine, default_prefill_tokens, default_slots

__all__ = ["Drafts", "NativeEngine", "default_prefill_tokens", "default_slots"]
