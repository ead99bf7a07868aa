"""A reward for steps whose answers mean nothing; imported by the verifier's workers, so it imports nothing."""

from __future__ import annotations


def coin(response: str, answer: str, problem: object) -> float:
    """0 or 1 by the text: advantages are never all zero, as they would be for a random model's answers."""
    return float(sum(response.encode()) % 2)
