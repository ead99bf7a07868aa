"""Rows of samples.jsonl of a step's groups, gathered from all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from luffy.distributed.world import World
from luffy.files import write_atomically
from luffy.learn.credit import uncredited
from luffy.learn.policy import Policy
from luffy.run_folder.recorder import sample_rows, trace_rows
from luffy.step.run_state import Run, StepBatch
from luffy.types import Sample, TokenView

Rows = list[dict[str, Any]]


def write_bad_step(run: Run, batch: StepBatch) -> Path:
    """All samples of a step whose update was not finite; returns their file."""
    path = run.cfg.folder / f"bad-step-{run.progress.step:06d}.jsonl"
    rows = batch_rows(run, batch)
    if run.world.is_main:
        write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def batch_rows(run: Run, batch: StepBatch, count: float = math.inf, with_views: bool = False) -> Rows:
    """Rows of samples.jsonl of the first ``count`` groups, whichever rank holds them. ``with_views``: the policy scores
    their tokens, on all ranks."""
    credited = {i: samples for i, samples in batch.samples.items() if i < count}
    rejected = {i: [uncredited(r) for r in group.rollouts] for i, group in batch.rejected.items() if i < count}
    views = _token_views(run.policy, credited) | _token_views(run.policy, rejected) if with_views else {}
    return in_order(run.world, [(i, _group_rows(run, batch, i, views.get(i, ()))) for i in [*credited, *rejected]])


def _token_views(policy: Policy, groups: Mapping[int, Sequence[Sample]]) -> dict[int, list[TokenView]]:
    views = iter(policy.token_views([sample for group in groups.values() for sample in group]))
    return {i: [next(views) for _ in group] for i, group in groups.items()}


def _group_rows(run: Run, batch: StepBatch, i: int, views: Sequence[TokenView]) -> Rows:
    step, samples = run.progress.step, batch.samples.get(i)
    if run.method == "sft":
        return trace_rows(step, samples or [], run.tokenizer, views, i)
    group = batch.rejected[i] if samples is None else batch.groups[i]
    return sample_rows(step, group, samples, run.tokenizer, views)


def in_order(world: World, rows: list[tuple[int, Rows]]) -> Rows:
    """Rows of all ranks, by their numbers."""
    ordered = sorted((pair for part in world.gather(rows) for pair in part), key=lambda pair: pair[0])
    return [row for _, part in ordered for row in part]
