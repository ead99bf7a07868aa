"""Environments that need no code of a user's own."""

from __future__ import annotations

from luffy.environments.kinds import environment


@environment("chain")
class Chain:
    """The quickstart's: sums of several small numbers, which a tiny model cannot do in its head."""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b
