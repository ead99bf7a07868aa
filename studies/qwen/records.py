"""What comes back of a run: its curves, its test scores, the time it had the GPU for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from luffy.run_folder.recorder import read_json_lines as read_lines

Row = dict[str, Any]
ENOUGH = 0.65  # of its steps, for a run that was cut off to be a result
CURVES = (
    "batch/on_solved", "batch/off_solved", "batch/solve_none", "batch/solve_all", "critic/rewards/mean",
    "actor/entropy_loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl", "actor/off_policy_prob",
    "actor/on_policy_prob", "actor/off_ratio_mean", "actor/sft_loss", "response_length/mean",
    "response_length/clip_ratio", "perf/update_tokens", "perf/computed_tokens", "rollout/logprob_diff_mean",
    "rollout/ess", "rollout/quantize_s",
    "timing_s/step", "timing_s/rollout", "timing_s/reward", "timing_s/old_log_probs", "timing_s/update",
    "timing_s/eval", "val-core/accuracy", "val-core/response_length", "val-core/truncated",
)  # fmt: skip


def read_rows(files: Iterable[Path]) -> dict[str, Row]:
    """Runs by name. Of a run in several files the one that got further counts, then the one with a test, then that of
    the later file. Of two that finished, the one that counts takes the evaluations that it lacks from the other, which
    may be another training with the same recipe and seed."""
    found: dict[str, Row] = {}
    for file in files:
        for row in read_lines(file):
            less, more = sorted((found.get(row["name"], row), row), key=_progress)
            found[row["name"]] = _joined(less, more) if less["status"] == "finished" else more
    return found


def _joined(less: Row, more: Row) -> Row:
    parts = {key: {**less.get(key, {}), **more.get(key, {})} for key in ("suites", "temperatures")}
    return less | more | {key: found for key, found in parts.items() if found}


def _progress(row: Row) -> tuple[bool, int, bool]:
    return row["status"] == "finished", max(row["curves"].get("step", [0]), default=0), "test" in row


def curves(metrics: Sequence[Row]) -> dict[str, list[Any]]:
    """Columns of the same length, None where a row has no such value."""
    names = [name for name in CURVES if any(name in row for row in metrics)]
    columns: dict[str, list[Any]] = {"step": [row["step"] for row in metrics]}
    return columns | {
        name: [_short(row.get(name), 6 if "accuracy" in name else 4) for row in metrics] for name in names
    }


def _short(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def gpu_seconds(jobs: Sequence[Row], name: str, times: Sequence[float]) -> list[float]:
    """For each of ``times``: the seconds that the run had been under way, each divided by the number of processes that
    shared the GPU in it. ``jobs`` are the lines of jobs.jsonl; a run that was resumed has several starts there."""
    change: dict[float, list[Row]] = defaultdict(list)
    for line in jobs:
        change[line["time"]].append(line)
    at, running, total, before = {}, set[str](), 0.0, 0.0
    for point in sorted({*change, *times}):
        total += (point - before) / len(running) if name in running else 0.0
        for line in change.get(point, ()):
            under_way = line["what"] == "started"
            if under_way and line["job"] == name and name in running:  # killed: up to its last step
                total = max((at[time] for time in times if time < point), default=0.0)
            (running.add if under_way else running.discard)(line["job"])
        before, at[point] = point, round(total, 1)
    return [at[time] for time in times]


def scores(folder: Path) -> Row:
    """Of a finished ``luffy eval``, by benchmark: the right samples of each problem, one digit a problem in the file's
    order, and the means; nothing where it is not finished."""
    result = folder / "result.json"
    return _scores(folder, result.stat().st_mtime_ns) if result.exists() else {}


@cache
def _scores(folder: Path, changed: int) -> Row:
    by_benchmark = defaultdict(list)
    for row in read_lines(folder / "items.jsonl"):
        by_benchmark[row["benchmark"]].append(row)
    return {name: _summary(items) for name, items in by_benchmark.items()}


def _summary(items: Sequence[Row]) -> Row:
    tokens = [row["tokens"] for row in items]
    cut = [row["finish"] == "length" for row in items]
    means = {"tokens": round(sum(tokens) / len(tokens), 1), "truncated": round(sum(cut) / len(cut), 4)}
    counts = _right(items)  # in the order in which responses ended
    right = "".join(str(counts[name]) for name in sorted(counts, key=lambda name: int(name.rpartition(":")[2])))
    return {"k": max(row["sample"] for row in items) + 1, "right": right, **means}


def right_counts(folder: Path) -> dict[str, int]:
    """Of a finished ``luffy eval``: right samples by problem."""
    return _right(read_lines(folder / "items.jsonl")) if (folder / "result.json").exists() else {}


def _right(items: Iterable[Row]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for row in items:
        counts[row["id"]] += row["score"] >= 1
    return dict(counts)


def got_far(row: Row) -> bool:
    """A run that was cut off earlier is no result yet."""
    return bool(max(row["curves"]["step"], default=0) >= ENOUGH * row["steps"])


def is_done(row: Row) -> bool:
    """Finished, or cut off late."""
    return row["status"] == "finished" or (row["status"] == "cut" and got_far(row))


def best_rates(rows: Iterable[Row]) -> dict[str, float]:
    """The learning rate of each method whose contest is decided: all runs that were not dropped are done. The best
    mean of the last four validation accuracies wins."""
    contests: dict[str, dict[float, Row]] = defaultdict(dict)
    for row in rows:
        if row.get("seed") == 0 and not row["note"]:
            contests[row["method"]][row["lr"]] = row
    return {method: lr for method, runs in contests.items() if (lr := _winner(list(runs.values()))) is not None}


def _winner(rows: Sequence[Row]) -> float | None:
    left = [row for row in rows if row["status"] != "dropped"]
    if len(rows) < 3 or not all(is_done(row) for row in left):
        return None
    return float(max(left, key=validation)["lr"])


def validation(row: Mapping[str, Any], values: int = 4) -> float:
    """The mean of the last validation accuracies: one alone does not tell rates apart."""
    found = list(validations(row["curves"]).values())[-values:]
    return sum(found) / len(found)


def validations(columns: Mapping[str, Sequence[Any]]) -> dict[int, float]:
    """Validation accuracy by step, of the columns that ``curves`` made."""
    pairs = zip(columns.get("step", ()), columns.get("val-core/accuracy", ()), strict=False)
    return {step: value for step, value in pairs if value is not None}


def last(row: Mapping[str, Any], metric: str) -> float:
    """The last value of a metric."""
    return float([value for value in row["curves"][metric] if value is not None][-1])
