"""Settings that a resume changed: what a run was told up to a step, and what from then on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from luffy.config import Config
from luffy.errors import UserError
from luffy.report.runs import CONFIG, flat_config, is_number, read_config

Changes = dict[str, tuple[Any, Any]]
OF_NO_CONSEQUENCE = {"out", "name"}  # where it lies
LENGTH = {"train.steps", "train.epochs"}  # how far it goes: of no consequence unless a schedule follows it
_KEPT = re.compile(r"config-step-(\d{6,})\.yaml")


def settings_before(folder: Path, step: int) -> Path:
    """The file that keeps what a run was told up to a step, when it is told otherwise."""
    return folder / f"config-step-{step:06d}.yaml"


def kept_settings(folder: Path) -> dict[int, Path]:
    """Files of settings that are no longer those of the run, by the last step that was made with them; in order."""
    found = ((_KEPT.fullmatch(path.name), path) for path in folder.glob("config-step-*.yaml"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def settings_at(folder: Path, step: float) -> Path:
    """The file with the settings that a step was made with."""
    return next((path for last, path in kept_settings(folder).items() if last >= step), folder / CONFIG)


def changes_of(folder: Path, through_step: float = math.inf) -> list[tuple[int, Changes]]:
    """What resumes changed up to a step: (the last step before, changes), in order. A damaged file says nothing."""
    kept = {step: path for step, path in kept_settings(folder).items() if step < through_step}
    if not kept:
        return []
    settings = [_read(path) for path in (*kept.values(), settings_at(folder, through_step))]
    found = [(step, changed(*pair)) for step, pair in zip(kept, pairwise(settings), strict=True)]
    return [(step, changes) for step, changes in found if changes]


def _read(path: Path) -> dict[str, Any]:
    with suppress(UserError):
        return read_config(path)
    return {}


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """{key: (before, now)} of two flat configs; none if one is empty. A knob that is newer than a record had its
    default then."""
    if not before or not now:
        return {}
    before, now = _without_empty(before), _without_empty(now)
    spared = OF_NO_CONSEQUENCE if _follows_length(now) else OF_NO_CONSEQUENCE | LENGTH
    first = _without_empty(flat_config(Config())) | before
    keys = sorted((before.keys() | now.keys()) - spared)
    return {key: (first.get(key), now.get(key)) for key in keys if first.get(key) != now.get(key)}


def _follows_length(settings: Mapping[str, Any]) -> bool:
    """Whether a schedule is spread over the whole training, so that a longer one changes every step of it."""

    def number(key: str) -> float:
        return settings[key] if is_number(settings.get(key)) else 0

    def ends(key: str) -> bool:
        steps = f"{key.removesuffix('end')}steps"
        return settings.get(key) is not None and settings.get(steps) is None

    guided = number("guidance.n_prefix") > 0 and settings.get("guidance.strategy") not in ("fixed", "random")
    second = "rollout.offpolicy_guidance."
    return (
        settings.get("optim.schedule") in ("linear", "cosine")
        or 0 < number("optim.warmup") < 1
        or (guided and number("guidance.prefix_steps") < 1)
        or ends("algorithm.mix.end")
        or (bool(settings.get(f"{second}enable")) and (ends(f"{second}tau_end") or ends(f"{second}eps_end")))
    )


def _without_empty(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value != {}}
