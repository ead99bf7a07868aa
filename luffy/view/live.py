"""Runs that may still be going, and their samples: each look reads only what was added since the last.

A sample goes by its number in the file, so that no text of a model or a dataset is ever part of a request.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.errors import UserError
from luffy.files import complete_lines
from luffy.report.methods import Method, group_runs, with_styles
from luffy.report.text import legible, shorten_middle
from luffy.run_folder.layout import CONFIG, EVAL_SAMPLES, METRICS, SAMPLES
from luffy.run_folder.runs import (
    EXCERPT,
    GroupKey,
    GroupKeys,
    RunRecord,
    SampleHead,
    find_begun,
    in_order,
    metric_row,
    read_config,
    read_samples,
    sample_head,
    sample_texts,
)

SAMPLE_FILES = {"train": SAMPLES, "eval": EVAL_SAMPLES}
LOOK_FOR_RUNS_S = 5.0  # between two walks over the folders
SEARCHED = ("problem", "prompt", "answer", "response")
KEPT_SEARCHES = 8
LONGEST_QUERY = 1000
PATIENCE_S = 0.2  # what one question may spend on reading
PAGE = 200  # entries of a list in one answer
Test = Callable[[SampleHead], bool]


@dataclass(frozen=True)
class Filter:
    """Which samples of a list are wanted; ``success`` is the reward of a solved problem."""

    reward: str = ""
    off_policy: str = ""
    truncated: bool = False
    shortest: int = 0
    longest: int | None = None
    step: int | None = None
    search: str = ""
    success: float = 1.0

    def __post_init__(self) -> None:
        for name, value, known in (("reward", self.reward, REWARDS), ("off_policy", self.off_policy, SOURCES)):
            if value and value not in known:
                raise UserError(f"{name} is {value!r}; known: {', '.join(known)}")
        if len(self.search) > LONGEST_QUERY:
            raise UserError(f"a search of {len(self.search):,} characters; at most {LONGEST_QUERY:,}")

    def matches(self, head: SampleHead) -> bool:
        """Whether a sample passes all filters except the search, which needs the text."""
        longest = head.length if self.longest is None else self.longest
        return (
            self.shortest <= head.length <= longest
            and (self.step is None or head.step == self.step)
            and (not self.truncated or head.finish == "length")
            and (not self.reward or REWARDS[self.reward](head.reward, self.success))
            and (not self.off_policy or SOURCES[self.off_policy](head))
        )


REWARDS: dict[str, Callable[[float | None, float], bool]] = {
    "solved": lambda reward, success: reward is not None and reward >= success,
    "unsolved": lambda reward, success: reward is not None and reward < success,
}
SOURCES: dict[str, Test] = {
    "teacher": lambda head: head.off_policy_tokens > 0,
    "override": lambda head: head.override_tokens > 0,
    "policy": lambda head: head.off_policy_tokens == 0 and head.override_tokens == 0,
    "turns": lambda head: head.turns > 1,
}


class Tail:
    """The complete lines added to a file since the last look; all of them again when the file was replaced, as a
    resumed run does."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        self._file: int | None = None

    def was_replaced(self) -> bool:
        """Whether the file was replaced; if so, start over."""
        stat = self.path.stat() if self.path.exists() else None
        current = stat.st_ino if stat else None
        replaced = current != self._file or (stat is not None and stat.st_size < self.position)
        if replaced:
            self._file, self.position = current, 0
        return replaced

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of each complete line that was added."""
        for offset, line in complete_lines(self.path, self.position):
            self.position = offset + len(line)
            yield offset, line


class SampleTable:
    """The samples of a file that may be growing: read when first opened, then what was added since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = Tail(path)
        self._lock = threading.Lock()
        self.complete = False
        self._forget()

    def _forget(self) -> None:
        self.heads: list[SampleHead] = []
        self._keys = GroupKeys()
        self._groups: dict[GroupKey, list[int]] = {}
        self._key_of: list[GroupKey] = []
        self._steps: dict[str, dict[int, int]] = {}
        self._searches: OrderedDict[str, tuple[int, list[int]]] = OrderedDict()

    @property
    def size(self) -> int:
        """Size of the file in bytes, which is cheaper than the number of its samples."""
        return self.path.stat().st_size if self.path.exists() else 0

    @contextmanager
    def up_to_date(self) -> Iterator[SampleTable]:
        """Lock the table and read what was added. A file of gigabytes is read in parts, one per request: ``complete``
        tells whether this was the last."""
        with self._lock:
            if self._tail.was_replaced():
                self._forget()
            self.complete = self._read_on(time.monotonic() + PATIENCE_S)
            yield self

    def _read_on(self, until: float) -> bool:
        for offset, line in self._tail.lines():
            self._add(sample_head(offset, sample_texts(line, self.path)))
            if time.monotonic() > until:
                return False
        return True

    def _add(self, head: SampleHead) -> None:
        number = len(self.heads)
        self.heads.append(head)
        self._key_of.append(self._keys.of(head))
        self._groups.setdefault(self._key_of[number], []).append(number)
        self._steps.setdefault(head.problem, {}).setdefault(head.step, number)

    def matching(self, wanted: Filter) -> list[int]:
        """Numbers of the samples that pass a filter, in the order they were recorded."""
        numbers: Sequence[int] = self._found(wanted.search) if wanted.search else range(len(self.heads))
        return [n for n in numbers if wanted.matches(self.heads[n])]

    def _found(self, query: str) -> list[int]:
        """Numbers of the samples that contain a text in any case. A repeated search reads only new samples."""
        query = query.lower()
        done, hits = self._searches.pop(query, (0, []))
        hits = hits + list(self._hits(query, done))
        self._searches[query] = len(self.heads), hits
        while len(self._searches) > KEPT_SEARCHES:
            self._searches.popitem(last=False)
        return hits

    def _hits(self, query: str, start: int) -> Iterator[int]:
        if start == len(self.heads):
            return
        # As it stands in the file; other letters than ASCII may be escaped there, in either case.
        written = json.dumps(query)[1:-1] if query.isascii() else ""
        numbers = {self.heads[n].offset: n for n in range(start, len(self.heads))}
        for offset, line in complete_lines(self.path, self.heads[start].offset):
            if offset > self.heads[-1].offset:
                return
            if offset not in numbers:  # a damaged line, which is no sample
                continue
            raw = line.decode("utf-8", "replace").lower()
            row = sample_texts(line, self.path) if written in raw else {}
            if any(query in str(row.get(name, "")).lower() for name in SEARCHED):
                yield numbers[offset]

    def page(self, numbers: Sequence[int], start: int, success: float) -> list[dict[str, Any]]:
        return [_entry(n, self.heads[n], success) for n in numbers[start : start + PAGE]]

    def group(self, number: int) -> tuple[list[int], list[dict[str, Any]]]:
        """The numbers and rows of all samples in the group of this one."""
        self._head(number)
        numbers = self._groups[self._key_of[number]]
        return numbers, read_samples(self.path, [self.heads[n].offset for n in numbers])

    def steps_of(self, number: int) -> list[tuple[int, int]]:
        """(step, number of the first sample) of each time the same problem was recorded, in order."""
        return sorted(self._steps[self._head(number).problem].items())

    def response(self, number: int) -> str:
        (row,) = read_samples(self.path, [self._head(number).offset])
        return str(row.get("response", ""))

    def _head(self, number: int) -> SampleHead:
        if not 0 <= number < len(self.heads):
            raise UserError(f"no sample {number}: there are {len(self.heads):,}; reload the page")
        return self.heads[number]


def _entry(number: int, head: SampleHead, success: float) -> dict[str, Any]:
    return {
        "at": number,
        "step": head.step,
        "problem": legible(shorten_middle(" ".join(head.problem.split()), 60)),
        "sample": head.sample,
        "reward": head.reward,
        "solved": head.reward is not None and head.reward >= success,
        "length": head.length,
        "truncated": head.finish == "length",
        "teacher": head.off_policy_tokens,
        "override": head.override_tokens,
        "turns": head.turns,
        "calls": head.calls,
        "ends": ("\u2026" if len(head.ends) == EXCERPT else "") + legible(" ".join(head.ends.split())),
    }


class LiveRun:
    """One run folder. A page knows its ``id`` instead of its path; ``trouble`` is the reason why it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        self._skipped: str | None = None
        self._unreadable: str | None = None
        self.rows: list[Mapping[str, Any]] = []
        self.samples = {name: SampleTable(folder / file) for name, file in SAMPLE_FILES.items()}
        self._metrics = Tail(folder / METRICS)
        self._config: dict[str, Any] = {}
        self._config_time: int | None = None

    @property
    def trouble(self) -> str | None:
        """The reason why the run, or a line of its metrics, cannot be read."""
        return self._unreadable or self._skipped

    def refresh(self) -> None:
        self._unreadable = None
        try:
            self._read_config()
            if self._metrics.was_replaced():
                self.rows, self._skipped = [], None
            for _, line in self._metrics.lines():
                self._add(line)
        except (UserError, OSError) as error:
            self._unreadable = str(error)

    def _add(self, line: bytes) -> None:
        try:
            self.rows.append(metric_row(line, self._metrics.path))
        except UserError as error:
            self._skipped = str(error)

    def _read_config(self) -> None:
        path = self.folder / CONFIG
        written = path.stat().st_mtime_ns if path.exists() else None
        if written != self._config_time:
            self._config, self._config_time = read_config(path), written

    @property
    def record(self) -> RunRecord:
        """The record of the report, without samples: those are read on request."""
        return RunRecord(self.folder, self._config, in_order(self.rows))

    @property
    def state(self) -> tuple[Any, ...]:
        """A value that changes when there is something new to show."""
        sizes = [table.size for table in self.samples.values()]
        return self.id, len(self.rows), self._config_time, self.trouble, *sizes


@dataclass(frozen=True)
class Snapshot:
    """All runs at one moment, by method; a method keeps its colour while the server runs. ``waiting`` are the folders
    of runs that have begun and made no step yet."""

    version: str
    methods: Sequence[Method]
    ids: Mapping[Path, str]
    waiting: Sequence[str]
    remarks: Sequence[str]

    def choose(self, styles: Sequence[int] | None) -> list[Method]:
        """Methods by the numbers of their colours; all when none is named."""
        return [method for method in self.methods if styles is None or method.style in styles]


class Board:
    """Every run in or below ``places``, also those that start later; at first there may be none."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = places
        self.runs: dict[str, LiveRun] = {}
        self._styles: dict[Path, int] = {}  # by run folder
        self._snapshot: Snapshot | None = None
        self._looked = -LOOK_FOR_RUNS_S
        self._lock = threading.Lock()
        self._look_for_runs()

    def run(self, run_id: str) -> LiveRun:
        if run_id not in self.runs:
            raise UserError("no such run on this page; reload it")
        return self.runs[run_id]

    def snapshot(self) -> Snapshot:
        with self._lock:
            self._look_for_runs()
            for run in self.runs.values():
                run.refresh()
            states = repr([run.state for run in self.runs.values()])
            version = hashlib.sha256(states.encode("utf-8", "replace")).hexdigest()[:16]
            if self._snapshot is None or self._snapshot.version != version:
                self._snapshot = self._take(version)
            return self._snapshot

    def _look_for_runs(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_FOR_RUNS_S:
            return
        found = [LiveRun(folder) for folder in find_begun(self.places)]
        self.runs = {run.id: self.runs.get(run.id, run) for run in found}
        self._looked = now

    def _take(self, version: str) -> Snapshot:
        started = [run for run in self.runs.values() if run.rows]
        methods = group_runs([run.record for run in started])
        styled = with_styles(methods, self._known_styles(methods))
        self._styles |= {run.folder: method.style for method in styled for run in method.runs}
        waiting = [legible(str(run.folder)) for run in self.runs.values() if not run.rows]
        troubles = [legible(run.trouble) for run in self.runs.values() if run.trouble]
        return Snapshot(version, styled, {run.folder: run.id for run in started}, waiting, troubles)

    def _known_styles(self, methods: Sequence[Method]) -> dict[int, int]:
        """By the place of a method the style of its runs, whatever the method is called by now."""
        known: dict[int, int] = {}
        for place, method in enumerate(methods):
            own = {self._styles[run.folder] for run in method.runs if run.folder in self._styles}
            if own - set(known.values()):
                known[place] = min(own - set(known.values()))
        return known
