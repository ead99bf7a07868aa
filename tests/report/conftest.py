"""Run folders written by hand: every figure in a report can be checked against the numbers put in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
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


class Page(HTMLParser):
    """Tables as lists of rows of cell texts, by class; all text; tags with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._rows: list[list[str]] | None = None
        self._open: list[str] = []
        self.feed(html)
        self.close()
        for rows in self.tables.values():
            rows[:] = [[" ".join(cell.split()) for cell in row] for row in rows]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        self._open.append(tag)
        if tag == "table":
            self._rows = self.tables[(given["class"] or "").split()[0]] = []
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th") and self._rows:
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass
        if tag == "table":
            self._rows = None

    def handle_data(self, data: str) -> None:
        if {"script", "style"} & set(self._open):
            return
        self.text += data
        if self._rows and self._rows[-1] and "title" not in self._open:
            self._rows[-1][-1] += data

    def row(self, table: str, name: str) -> list[str]:
        return next(row for row in self.tables[table] if row and row[0] == name)


@pytest.fixture
def read_page():
    return lambda path: Page(Path(path).read_text(encoding="utf-8"))


@pytest.fixture
def make_metric_row():
    return metric_row


@pytest.fixture
def make_sample_row():
    return sample_row
