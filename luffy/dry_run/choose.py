"""Which methods docs/choose.md names for a base and its traces; the page has the same table."""

from __future__ import annotations

from dataclasses import dataclass

PAGE = "docs/choose.md"
TRIES = 8  # samples of a problem, which is solved if one of them is correct
FEW, MANY = 0.05, 0.5  # of the problems, solved: so few, and so many
RARE = 0.05  # a token with a lower probability is unlikely to the base
UNLIKELY = 0.05  # traces with such a fraction of unlikely tokens are


@dataclass(frozen=True)
class Case:
    """A row of the page's table: ``when`` it holds, and what to ``take``."""

    when: str
    take: str


CLOSE = Case(f"at least {MANY:.0%} solved, less than {UNLIKELY:.0%} of tokens unlikely", "SFT, then RL: `sft_rl`")
FAR = Case(
    f"at least {MANY:.0%} solved, at least {UNLIKELY:.0%} of tokens unlikely", "not measured: `sft_rl` or `luffy`"
)
SOME = Case(f"between {FEW:.0%} and {MANY:.0%} solved", "traces only for failed problems: `ampo`, `ghpo`, `relift`")
STUCK = Case(f"at most {FEW:.0%} solved", "traces in the group: `luffy`; or `sft_rl`")
NO_TRACES = Case("no traces", "`on_policy`, `dapo`, `maxrl`")
CASES = (CLOSE, FAR, SOME, STUCK, NO_TRACES)


def case_of(solved: float | None, unlikely: float | None, has_traces: bool = True) -> Case | None:
    """The case of a base that solves the fraction ``solved`` of the problems and finds the fraction ``unlikely`` of the
    traces' tokens so; None if a fraction that decides is not known."""
    if not has_traces:
        return NO_TRACES
    if solved is None:
        return None
    if solved < MANY:
        return STUCK if solved <= FEW else SOME
    if unlikely is None:
        return None
    return CLOSE if unlikely < UNLIKELY else FAR
