"""A seed for whatever is drawn, from a name: the same in every process and after a resume."""

from __future__ import annotations

import hashlib


def seed_of(name: str) -> int:
    """A 63-bit seed, such as that of ``f"{run_seed}:{step}:{problem_id}"``."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
