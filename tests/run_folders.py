"""Run folders written by hand: every figure in a report can be checked against the numbers put in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml


def metric_row(step: int, accuracy: float | None = None, **more: float) -> dict[str, float]:
    row = {
        "step": step, "time": 1000.0 + step, "critic/rewards/mean": 0.1 * step, "critic/score/mean": 0.1 * step,
        "batch/off_solved": 1.0, "response_length/mean": 20.0, "actor/entropy_loss": 0.5, "actor/pg_clipfrac": 0.0,
        "actor/off_policy_prob": 0.4, "actor/sft_loss": 0.0, "actor/grad_norm": 1.0, "perf/throughput": 100.0,
        "timing_s/rollout": 1.0, "timing_s/update": 0.5, "timing_s/step": 2.0,
    }  # fmt: skip
    return {**row, **({} if accuracy is None else {"val-core/accuracy": accuracy}), **more}


def sample_row(step: int, sample: int = 0, **changes: object) -> dict[str, object]:
    return {
        "step": step, "problem": "p1", "sample": sample, "prompt": "2+3=?", "answer": "5", "response": "a b c",
        "token_ids": [1, 2, 3], "tokens": ["a", " b", " c"], "off_policy": [1, 1, 0], "log_probs": [0.0, 0.0, -0.1],
        "reward": 1.0, "status": "ok", "finish": "stop", "prefix_ratio": 0.5, "advantages": [0.25, 0.25, 0.25],
        "policy_version": 0, **changes,
    }  # fmt: skip


@pytest.fixture
def write_run(tmp_path: Path):
    """``write_run("luffy/seed-0", rows, config={"optim": {"lr": 1e-5}})`` -> the folder."""

    def write(
        name: str, rows: Sequence[object], config: dict | None = None, samples: Sequence[object] = (), tail: str = ""
    ) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        digits = "".join(c if c.isdigit() else " " for c in folder.name).split()
        values = {"seed": int(digits[-1]) if digits else 0, "name": name, "out": str(tmp_path), **(config or {})}
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
        return folder

    return write


@pytest.fixture
def make_metric_row():
    return metric_row


@pytest.fixture
def make_sample_row():
    return sample_row
