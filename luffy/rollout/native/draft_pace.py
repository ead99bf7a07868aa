"""When drafts pay: few sequences run, and verifying was faster than plain decoding when both were last measured.

What is measured decides about speed alone: a draft changes no token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

# A pass over more tokens computes longer than it reads the weights, and plain decoding takes over.
VERIFIED_TOKENS = 256
TRIAL = 8  # passes, then the two ways are compared
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096  # plain steps after drafts were slower


@dataclass
class Measured:
    """The two ways with about as many rows."""

    plain: float | None = None  # seconds of a step
    seconds: float = 0.0  # of the passes of this trial
    kept: float = 0.0  # tokens of a row in them
    passes: int = 0
    pause: int = FIRST_PAUSE
    wait: int = 0  # plain steps before the next trial

    def stepped(self, steps: int, seconds: float) -> None:
        each = seconds / steps
        self.plain = each if self.plain is None else 0.75 * self.plain + 0.25 * each
        self.wait = max(self.wait - steps, 0)

    def verified(self, kept: float, seconds: float) -> None:
        self.seconds, self.kept, self.passes = self.seconds + seconds, self.kept + kept, self.passes + 1
        if self.passes < TRIAL or self.plain is None:
            return
        if self.seconds > self.plain * self.kept:
            self.wait, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
        else:
            self.pause = FIRST_PAUSE
        self.seconds, self.kept, self.passes = 0.0, 0.0, 0


class Pace:
    """Chooses, before each step, how many tokens of a sequence it verifies. ``always``: whenever few enough run."""

    def __init__(self, tokens: int, always: bool, clock: Callable[[], float]) -> None:
        self._sizes = (tokens, tokens // 2)
        self._always, self._clock = always, clock
        self._measured: dict[int, Measured] = defaultdict(Measured)
        self._last: tuple[int, int, float] | None = None  # tokens, kind of rows, when the last step ended

    def tokens_for(self, rows: int) -> int:
        """Tokens of each of the sequences in the next pass; 1: a plain step."""
        tokens = next((n for n in self._sizes if n > 1 and 0 < rows * n <= VERIFIED_TOKENS), 1)
        if tokens == 1 or self._always:
            return tokens
        measured = self._measured[rows.bit_length()]
        return 1 if measured.plain is None or measured.wait else tokens

    def stepped(self, rows: int, steps: int) -> None:
        """So many plain steps have been made since the last call."""
        if (seconds := self._since_last(1, rows)) is not None:
            self._measured[rows.bit_length()].stepped(steps, seconds)

    def verified(self, rows: int, tokens: int, kept: float) -> None:
        """A pass has been made in which a sequence kept so many tokens in the mean."""
        if (seconds := self._since_last(tokens, rows)) is not None:
            self._measured[rows.bit_length()].verified(kept, seconds)

    def interrupted(self) -> None:
        """Something else took time."""
        self._last = None

    def _since_last(self, tokens: int, rows: int) -> float | None:
        """Seconds since the last step, if that was of the same kind: the first one of a kind costs more."""
        now, last = self._clock(), self._last
        self._last = (tokens, rows.bit_length(), now)
        return now - last[2] if last is not None and last[:2] == self._last[:2] else None
