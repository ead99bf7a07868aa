"""state.json of a checkpoint, checked before it is used: its files may come from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from luffy.errors import UserError
from luffy.files import as_object, json_object

REMEDY = "resume from another checkpoint, or start a new run with model.path= its model folder"
METHODS = ("rl", "sft")
MOST = 2**53  # of any counter


@dataclass
class Progress:
    """Counters that a checkpoint keeps, in its state.json. ``step`` is the number of finished steps, ``problems`` the
    sum of their ``batch.problems``: what ``train.epochs`` counts, whatever replay or oversampling draw."""

    step: int = 0
    problems: int = 0
    bad_in_a_row: int = 0
    bad_updates: int = 0
    best_step: int | None = None
    best_accuracy: float = -1.0

    def note_best(self, accuracy: float | None) -> bool:
        """Whether the held-out accuracy of the last step (None: not evaluated) is the best so far; it is noted then."""
        if accuracy is None or accuracy <= self.best_accuracy:
            return False
        self.best_accuracy, self.best_step = accuracy, self.step
        return True

    def forget_best(self) -> None:
        """Let the next evaluation be the best: those before are of another run, or measured something else."""
        self.best_accuracy, self.best_step = -1.0, None


def read_state(path: Path, step: int | None) -> dict[str, Any]:
    """The content of a state.json; a UserError unless this version or an older one wrote it. ``step``: that of the
    folder's name, if it has one."""
    kinds: dict[str, type] = {"progress": dict, "method": str, "sampler": dict, "data_fingerprint": str}
    state = json_object(path.read_bytes(), path, REMEDY, **kinds, usable=int, model=dict)
    if state["method"] not in METHODS:
        raise UserError(f"{path}: 'method' must be one of {', '.join(METHODS)}; {REMEDY}")
    _check_progress(state["progress"], path, step)
    for key in state["sampler"]:
        _check_count(state["sampler"], key, f"{path}: sampler")
    if not isinstance(state.get("date"), str | None):
        raise UserError(f"{path}: needs a text as 'date'; {REMEDY}")
    if "traces" in state:
        names: dict[str, type] = {"rollout.max_tokens": int, "data.overlong_trace": str, "left_out": int}
        as_object(state["traces"], f"{path}: traces", REMEDY, **names)
    return state


def _check_progress(progress: dict[str, Any], path: Path, step: int | None) -> None:
    known = {field.name for field in fields(Progress)}
    if foreign := sorted(progress.keys() - known):
        raise UserError(f"{path}: progress has {foreign[0][:40]!r}, which no run writes; {REMEDY}")
    as_object(progress, f"{path}: progress", REMEDY, step=int)
    for key in known & progress.keys() - {"best_accuracy"}:
        if progress[key] is not None or key != "best_step":
            _check_count(progress, key, f"{path}: progress")
    accuracy = progress.get("best_accuracy", -1.0)
    if isinstance(accuracy, bool) or not isinstance(accuracy, int | float) or not abs(accuracy) < MOST:
        raise UserError(f"{path}: progress: needs a number as 'best_accuracy'; {REMEDY}")
    if step is not None and progress["step"] != step:
        raise UserError(f"{path}: of step {progress['step']}, its folder of step {step}; {REMEDY}")


def _check_count(values: Mapping[str, Any], key: str, where: str) -> None:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise UserError(f"{where}: needs a whole number of at least 0 as {key[:40]!r}; {REMEDY}")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; a UserError if it is not one."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({' '.join(str(error).split())[:200]}); {REMEDY}") from None
