"""The folders of the runs: their state on disk, and the rows that come back of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from luffy.config import parse_yaml
from luffy.files import write_atomically
from studies.qwen.evaluations import Evaluation, scores_of
from studies.qwen.plan import METHODS
from studies.qwen.records import Row, curves, gpu_seconds, read_lines, validations

BASE = "base"


class Folders:
    """``out`` has a folder a run: its recipe, status, metrics and checkpoints, at its end its model, and evaluations of
    that."""

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)

    def begin(self, recipe: Mapping[str, Any]) -> Path:
        """Where the recipe is."""
        folder = self.out / recipe["name"]
        folder.mkdir(exist_ok=True)
        self.set_status(recipe["name"], "running")
        (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)), encoding="utf-8")
        return folder / "recipe.yaml"

    def status(self, name: str) -> Row:
        """``status`` and, of a run that was dropped, the ``step`` of its rung; nothing of a run that never began."""
        path = self.out / name / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def set_status(self, name: str, status: str, step: int | None = None) -> None:
        found = {"status": status} | ({} if step is None else {"step": step})
        write_atomically(self.out / name / "status.json", json.dumps(found))

    def validation(self, name: str) -> dict[int, float]:
        return validations(curves(self._metrics(name)))

    def last_step(self, name: str) -> int:
        return max((row["step"] for row in self._metrics(name)), default=0)

    def _metrics(self, name: str) -> list[Row]:
        return read_lines(self.out / name / "metrics.jsonl")

    def checkpoint(self, name: str) -> Path | None:
        latest = self.out / name / "checkpoints" / "latest"
        return latest.resolve() if latest.exists() else None

    def keep_model(self, name: str, status: str) -> None:
        """Requires a checkpoint. A run that is finished keeps no other part of it."""
        folder, checkpoint = self.out / name, self.checkpoint(name)
        assert checkpoint is not None
        for old in ("model", "evaluations"):  # of an earlier step
            shutil.rmtree(folder / old, ignore_errors=True)
        shutil.copytree(checkpoint / "model", folder / "model", copy_function=os.link)
        self.set_status(name, status)
        if status == "finished":
            shutil.rmtree(folder / "checkpoints")

    def model(self, name: str) -> Path:
        return self.out / name / "model"

    def models(self) -> list[str]:
        """Runs that are over and left a model."""
        names = sorted(path.parent.name for path in self.out.glob("*/model"))
        return [name for name in names if self.status(name).get("status") in ("finished", "cut")]

    def evaluation(self, name: str, evaluation: Evaluation) -> Path:
        return self.out / name / "evaluations" / evaluation.name

    # ---- what comes back

    def rows(self, jobs: Sequence[Row]) -> list[Row]:
        """``jobs`` are the lines of jobs.jsonl."""
        found = [self.row(path.parent.name, jobs) for path in sorted(self.out.glob("*/recipe.yaml"))]
        base = scores_of(self.out / BASE / "evaluations")
        return [*found, *([{"name": BASE, "method": BASE, "status": "finished", "curves": {}} | base] if base else [])]

    def row(self, name: str, jobs: Sequence[Row] = ()) -> Row:
        recipe = parse_yaml(self.out / name / "recipe.yaml")
        metrics = self._metrics(name)
        found = {"name": name, **_about(recipe), **self.status(name), "curves": curves(metrics)}
        found["curves"]["gpu_seconds"] = gpu_seconds(jobs, name, [m["time"] for m in metrics])
        return found | scores_of(self.out / name / "evaluations")


def _about(recipe: Mapping[str, Any]) -> Row:
    """What a row says of its run; the name holds the method and the note."""
    method, *rest = recipe["name"].split("-lr")[0].split("-", 1)
    assert method in METHODS, recipe["name"]
    return {"method": method, "note": rest[0] if rest else "", "lr": recipe["optim"]["lr"], "seed": recipe["seed"],
            "steps": recipe["train"]["steps"]}  # fmt: skip
