"""Runs that may still be going: each look reads only what was added since the last."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.errors import UserError
from luffy.report.method_colours import with_styles
from luffy.report.methods import Method, Styled, group_runs
from luffy.report.text import legible
from luffy.run_folder.layout import CONFIG, EVAL_SAMPLES, METRICS, SAMPLES
from luffy.run_folder.runs import RunRecord, SampleIndex, find_begun, in_order, metric_row, read_config
from luffy.view.browse import SampleTable, Tail

SAMPLE_FILES = {"train": SAMPLES, "eval": EVAL_SAMPLES}
LOOK_FOR_RUNS_S = 5.0  # between two walks over the folders


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
        return RunRecord(self.folder, self._config, in_order(self.rows), SampleIndex(self.folder / SAMPLES, {}))

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
    methods: Sequence[Styled]
    ids: Mapping[Path, str]
    waiting: Sequence[str]
    remarks: Sequence[str]

    def choose(self, styles: Sequence[int] | None) -> list[Styled]:
        """Methods by the numbers of their colours; all when none is named."""
        return [styled for styled in self.methods if styles is None or styled[0] in styles]


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
        self._styles |= {run.folder: style for style, method in styled for run in method.runs}
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
