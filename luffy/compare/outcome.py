"""What a comparison found: one table, intervals on the test problems, and a winner only if the data support one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from luffy.compare.arms import Arm
from luffy.compare.state import ArmState
from luffy.evaluation.compare import Difference, paired_difference

RESAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """A candidate: a method at a learning rate over its seeds. ``items``: accuracy by test problem, mean over seeds."""

    name: str
    arms: tuple[Arm, ...]
    seconds: float
    validation: float | None
    items: Mapping[str, float]
    fate: str

    @property
    def test(self) -> float | None:
        return fmean(self.items.values()) if self.items else None


@dataclass(frozen=True)
class Outcome:
    """``rows``: the best first. ``behind``: each other finalist minus the leader. ``winner``: None if the test does not
    tell the leader from the best of another method."""

    rows: tuple[Row, ...]
    behind: Mapping[str, Difference]
    winner: Row | None
    words: tuple[str, ...]


def outcome_of(arms: Sequence[Arm], states: Mapping[str, ArmState]) -> Outcome:
    names = dict.fromkeys(arm.candidate for arm in arms)
    rows = [_row(name, [arm for arm in arms if arm.candidate == name], states) for name in names]
    rows.sort(key=lambda row: (row.test is None, -(row.test or 0.0), -(row.validation or 0.0)))
    finalists = [row for row in rows if row.test is not None]
    if not finalists:
        return Outcome(tuple(rows), {}, None, ("No arm reached the test: no winner.",))
    leader, others = finalists[0], finalists[1:]
    behind = {row.name: _difference(leader, row) for row in others}
    told = [row for row in others if behind[row.name].significant]
    close = [row for row in others if row not in told]
    if not others:
        words = [f"{leader.name} alone reached the test, so nothing was compared with it: no winner."]
    elif close:
        words = [f"No winner: the test of {len(leader.items)} problems does not tell the leader from the next."]
    else:
        words = [f"Winner: {leader.name}."]
    words += [_sentence(leader, row, behind[row.name], row in told) for row in others]
    return Outcome(tuple(rows), behind, leader if others and not close else None, tuple(words))


def _row(name: str, arms: Sequence[Arm], states: Mapping[str, ArmState]) -> Row:
    own = [states[arm.name] for arm in arms]
    scores = [state.rungs[-1] for state in own if state.rungs]
    failed = [state.why for state in own if state.status == "failed"]
    tested = [state.items for state in own if state.items]
    shared = set.intersection(*map(set, tested)) if tested and len(tested) == len(own) else set()
    items = {key: fmean(found[key] for found in tested) for key in sorted(shared)}
    dropped = max(len(state.rungs) for state in own)
    fate = f"failed: {failed[0]}" if failed else "finalist" if items else f"dropped after rung {dropped}"
    return Row(name, tuple(arms), sum(s.seconds for s in own), fmean(scores) if scores else None, items, fate)


def _difference(leader: Row, other: Row) -> Difference:
    keys = sorted(leader.items.keys() & other.items.keys())
    first, second = (np.array([row.items[key] for key in keys]) for row in (leader, other))
    return paired_difference([("test", first, second)], RESAMPLES)


def _sentence(leader: Row, other: Row, found: Difference, told: bool) -> str:
    points, low, high = (-100 * value for value in (found.value, found.high, found.low))
    said = f"{leader.name} is {points:.1f} points ahead of {other.name} (95 % interval {low:+.1f} to {high:+.1f})"
    return f"{said}." if told else f"{said}: within the noise."


def markdown(outcome: Outcome, budget: str) -> str:
    """The table and the words."""
    heads = ["candidate", "seeds", "seconds of training", "validation %", "test %", "minus the leader, 95 %", "fate"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in outcome.rows:
        found = outcome.behind.get(row.name)
        shown = "" if found is None else f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
        cells = [row.name, str(len(row.arms)), f"{row.seconds:.0f}", _percent(row.validation), _percent(row.test)]
        lines.append("| " + " | ".join([*cells, shown, row.fate.replace("|", "/")]) + " |")
    about = (
        f"Budget {budget}. Seconds are those of steps, SFT stages, evaluations and checkpoints; an arm ends after the "
        "step in which it reaches those of its rung. Validation decided which arms went on; the finalists alone had "
        "the test. Intervals are a paired bootstrap over its problems; they do not cover the seeds."
    )
    if any(len(row.arms) == 1 for row in outcome.rows):
        about += " Each has one seed: with another one, methods that are close may change places (`--seeds 2`)."
    return "\n".join([*outcome.words, "", *lines, "", about, ""])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"
