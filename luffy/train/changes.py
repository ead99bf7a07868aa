"""What a resumed run is asked to do that it did not do before."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from luffy.config import Config
from luffy.errors import UserError
from luffy.report.runs import CONFIG, flat_config, read_config

Changes = dict[str, tuple[Any, Any]]
OF_NO_CONSEQUENCE = {"out", "name", "train.steps", "train.epochs"}  # where it lies, and how far it goes


def settings_before(folder: Path, step: int) -> Path:
    """The file that keeps what a run was told up to a step, when it is told otherwise."""
    return folder / f"config-step-{step:06d}.yaml"


def changed_settings(folder: Path, step: int, cfg: Config) -> Changes:
    """Settings that the steps up to ``step`` were made with otherwise: {key: (before, now)}. A knob that is newer than
    the record had its default then."""
    kept = settings_before(folder, step)  # of a resume since then that came to no further checkpoint
    before: dict[str, Any] = {}
    with suppress(UserError):  # a damaged record says nothing
        before = _without_empty(read_config(kept if kept.exists() else folder / CONFIG))
    now = _without_empty(flat_config(cfg))
    keys = sorted((before.keys() | now.keys()) - OF_NO_CONSEQUENCE) if before else []
    first = _without_empty(flat_config(Config())) | before
    return {key: (first.get(key), now.get(key)) for key in keys if first.get(key) != now.get(key)}


def _without_empty(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value != {}}


def in_words(changes: Changes) -> str:
    shown = ", ".join(f"{key} {_short(before)} -> {_short(now)}" for key, (before, now) in changes.items())
    return shown + ("; the weights stay the checkpoint's" if "model.path" in changes else "")


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
