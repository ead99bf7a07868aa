"""Second pass: from the journal's findings to which problems and traces are written, and why the others are not."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from luffy.errors import ConfigError
from luffy.prepare.journal import Record

# LUFFY paper, appendix C.1: what the teacher solves within 2k tokens is Easy, within 4k Hard (Easy included).
SPLITS: dict[str, int | None] = {"all": None, "easy": 2048, "hard": 4096}
REST = "rest"
VERIFIED = ("ok", "wrong", "no_answer", "timeout", "crashed", "error")
NO_USABLE_TRACE = ("no_trace", "too_long", "not_confirmed")

TRAIN, HELD_OUT, DROPPED = 1, 2, 0


@dataclass(frozen=True)
class Choice:
    """What is asked of the second pass. It may change between runs: the verified traces stay good."""

    split: str = "all"
    max_traces: int | None = None
    held_out: str = "0"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"--split {self.split} is unknown; known: {', '.join(SPLITS)}")
        if self.max_traces is not None and self.max_traces < 1:
            raise ConfigError(f"--max-traces-per-problem {self.max_traces} leaves no trace; give 1 or more")
        held_out_count(self.held_out, 1)

    @property
    def limit(self) -> int | None:
        return SPLITS[self.split]


@dataclass
class Selection:
    """Where each row goes, and the counts of the data card."""

    places: bytearray = field(default_factory=bytearray)
    rows_dropped: Counter[str] = field(default_factory=Counter)
    traces_read: int = 0
    traces_dropped: Counter[str] = field(default_factory=Counter)
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    trace_tokens: array[int] = field(default_factory=lambda: array("q"))

    def count(self, place: int) -> int:
        return self.places.count(place)

    @property
    def traces_kept(self) -> int:
        return len(self.trace_tokens)


def held_out_count(held_out: str, kept: int) -> int:
    """``0.1`` is a share, ``500`` a number, ``rest`` takes none of the kept problems."""
    if held_out == REST:
        return 0
    try:
        value = float(held_out)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf or (value >= 1 and not value.is_integer()):
        raise ConfigError(f"--held-out {held_out}: give a share below 1, a number of problems, or '{REST}'")
    if value < 1:
        return round(value * kept)
    return int(value)


def kept_traces(record: Record, choice: Choice) -> tuple[list[int], Counter[str]]:
    """Places of the traces to write, in the dataset's order, and the reasons of the others."""
    kept: list[int] = []
    reasons: Counter[str] = Counter()
    for place, (length, verdict) in enumerate(record["traces"]):
        if verdict != "ok":
            reasons[verdict] += 1
        elif choice.limit is not None and length > choice.limit:
            reasons["over_split"] += 1
        elif choice.max_traces is not None and len(kept) == choice.max_traces:
            reasons["over_count"] += 1
        else:
            kept.append(place)
    return kept, reasons


def why_none(verdicts: Iterable[str]) -> str:
    """Why a problem has no trace to write."""
    found = set(verdicts)
    if not found - {"empty"}:
        return "no_trace"
    if "ok" in found:
        return "over_split"
    judged = found & set(VERIFIED)
    if judged == {"error"}:
        return "unverifiable"  # the verifier could read nothing in the gold
    return "too_long" if not judged and "too_long" in found else "not_confirmed"


def select(records: Iterable[Record], choice: Choice) -> Selection:
    """One decision per record. The first usable row of several with the same question is the one that is kept."""
    selection = Selection()
    keys: dict[str, int] = {}
    rest: list[tuple[int, str, str]] = []
    for number, record in enumerate(records):
        reason = _place(record, choice, selection, keys, number)
        selection.places.append(DROPPED if reason else TRAIN)
        if reason in NO_USABLE_TRACE and choice.held_out == REST:
            rest.append((number, record["key"], reason))
        if reason:
            selection.rows_dropped[reason] += 1
    if choice.held_out == REST:
        _hold_out_rest(selection, rest, keys)
    else:
        _hold_out(selection, keys, choice)
    return selection


def _place(record: Record, choice: Choice, selection: Selection, keys: dict[str, int], number: int) -> str:
    """Count one record; the reason it is dropped for, or nothing."""
    selection.traces_read += record["generations"]
    if "drop" in record:
        selection.traces_dropped["problem_dropped"] += record["generations"]
        return str(record["drop"])
    kept, reasons = kept_traces(record, choice)
    if kept and record["key"] in keys:
        selection.traces_dropped["problem_dropped"] += record["generations"]
        return "duplicate"
    selection.traces_dropped.update(reasons)
    if not kept:
        return why_none(verdict for _, verdict in record["traces"])
    keys[record["key"]] = number
    selection.prompt_tokens.append(record["prompt"])
    selection.trace_tokens.extend(record["traces"][place][0] for place in kept)
    return ""


def _hold_out(selection: Selection, keys: dict[str, int], choice: Choice) -> None:
    """A seeded draw by question, so that neither the order nor the files of the source matter."""
    count = held_out_count(choice.held_out, len(keys))
    if count and count >= len(keys):
        raise ConfigError(f"--held-out {choice.held_out} leaves nothing to train on: {len(keys)} problems are usable")
    ranked = sorted(keys, key=lambda key: hashlib.blake2b(f"{choice.seed}:{key}".encode()).digest())
    for key in ranked[:count]:
        selection.places[keys[key]] = HELD_OUT


def _hold_out_rest(selection: Selection, rest: list[tuple[int, str, str]], keys: dict[str, int]) -> None:
    """The paper's SFT+RL data: problems whose traces were all wrong or too long, to be used without traces."""
    taken = set(keys)
    for number, key, reason in rest:
        if key not in taken:
            taken.add(key)
            selection.places[number] = HELD_OUT
            selection.rows_dropped[reason] -= 1
    selection.rows_dropped += Counter()  # without the reasons that are down to 0
