"""Stages of a run in the report: where one ends in the curves, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from luffy.errors import UserError
from luffy.report.text import legible, number
from luffy.run_folder.runs import RunRecord
from luffy.run_folder.stages import FinishedStage, read_stages

NONE = "\u2013"
ENDED = {"steps": "its steps were made", "seconds": "its seconds were spent", "flat_loss": "held-out loss was flat",
         "flat_accuracy": "held-out accuracy was flat"}  # fmt: skip
SECONDS = ("timing_s/step", "timing_s/eval", "timing_s/save")
Metrics = Sequence[Mapping[str, object]]


def borders(runs: Sequence[RunRecord]) -> dict[int, str]:
    """The last step of each stage that another follows, with the name of that one."""
    found: dict[int, str] = {}
    for run in runs:
        before: Mapping[str, object] | None = None
        for row in run.rows:
            name = row.get("stage")
            if before is not None and isinstance(name, str) and before.get("stage") not in (None, name):
                found.setdefault(int(str(before["step"])), legible(name))
            before = row
    return found


def stage_cells(run: RunRecord) -> list[list[str]]:
    """The texts of the table's rows on one run. Accuracy and loss are the stage's last held-out ones."""
    done = {stage.name: stage for stage in _finished(run)}
    seed = NONE if run.seed is None else str(run.seed)
    return [[seed, legible(name), *_cells(run, name, done.get(name))] for name in run.stage_names]


def _finished(run: RunRecord) -> Sequence[FinishedStage]:
    try:
        return read_stages(run.folder).finished
    except (UserError, OSError):
        return ()


def _cells(run: RunRecord, name: str, done: FinishedStage | None) -> list[str]:
    rows = [row for row in run.rows if row.get("stage") == name and row["step"] > 0]
    if not rows:
        return [NONE, "not begun", NONE, NONE, NONE, NONE, NONE]
    sampled = any(key.startswith("critic/") for row in rows for key in row)
    first, last = int(rows[0]["step"]), int(rows[-1]["step"])
    if done is not None:
        first, last = done.first + 1, done.last
    return [
        "RL" if sampled else "SFT",
        f"{first} to {last}",
        NONE if done is None else ENDED.get(done.ended_by, NONE),
        NONE if done is None else f"step {done.handed_on}",
        _last(rows, "val-core/accuracy"),
        _last(rows, "val-traces/loss"),
        number(math.fsum(float(str(row.get(key) or 0.0)) for row in rows for key in SECONDS), 1),
    ]


def _last(rows: Metrics, metric: str) -> str:
    found = next((row[metric] for row in reversed(rows) if metric in row), None)
    return number(found) if isinstance(found, float) else NONE
