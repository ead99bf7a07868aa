"""stages.json of a run with stages: the finished ones, and where the current one was told to end.

A stage is finished when its last checkpoint is on the disk and another stage follows. The decision to end before the
planned steps is written before that checkpoint is, so that a resumed run ends at the same step whatever the clock says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from luffy.config import Config
from luffy.config.stages import Stage
from luffy.errors import UserError
from luffy.files import as_object, json_object, write_atomically
from luffy.run_folder.layout import STAGES
from luffy.run_folder.runs import flat_config
from luffy.schema import to_dict

T = TypeVar("T")

REMEDY = "restore it from a copy, or begin again with another name="
# Settings that leave a stage as it was made, with those below them.
NO_CHANGE = (
    "out", "name", "prepare", "made_for", "stages", "launch", "parallel", "ray", "record", "reward.workers",
    "model.device", "model.gradient_checkpointing", "train.save_every", "train.keep", "train.keep_optimizer",
    "train.threads", "train.max_bad_steps", "optim.offload",
)  # fmt: skip


@dataclass(frozen=True)
class FinishedStage:
    """Steps ``first`` + 1 to ``last`` of the run. ``ended_by``: steps, flat_loss, flat_accuracy or seconds;
    ``handed_on``: the step of the checkpoint that the next stage began with; ``settings``: flat, of its config."""

    name: str
    method: str
    first: int
    last: int
    ended_by: str
    handed_on: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Ending:
    """The decision to end the stage of that name after ``step``. ``knobs``: what it was taken by."""

    name: str
    step: int
    ended_by: str
    knobs: Mapping[str, Any]


@dataclass(frozen=True)
class StageFile:
    """The content of stages.json."""

    finished: tuple[FinishedStage, ...] = ()
    ending: Ending | None = None

    def ending_of(self, stage: Stage) -> Ending | None:
        """The decision on this stage, unless its knobs were changed since."""
        found = self.ending
        return found if found is not None and (found.name, found.knobs) == (stage.name, to_dict(stage.knobs)) else None

    def write(self, folder: Path) -> None:
        write_atomically(folder / STAGES, json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Span:
    """The place of a stage in its run. ``first``: steps of earlier stages; ``recipe``: the config of the whole run;
    ``handed_on``: steps of checkpoints that stages began with, which are kept; ``told``: facts for the user."""

    stage: Stage
    recipe: Config
    first: int = 0
    ending: Ending | None = None
    handed_on: frozenset[int] = frozenset()
    told: Sequence[str] = field(default=())


def read_stages(folder: Path) -> StageFile:
    """What stages.json says; nothing is finished where there is none."""
    path = folder / STAGES
    if not path.is_file():
        return StageFile()
    value = json_object(path.read_bytes(), path, REMEDY, finished=list)
    numbers: dict[str, type] = dict.fromkeys(("first", "last", "handed_on"), int)
    finished = (_read(FinishedStage, entry, path, method=str, settings=dict, **numbers) for entry in value["finished"])
    ending = value.get("ending")
    return StageFile(tuple(finished), None if ending is None else _read(Ending, ending, path, step=int, knobs=dict))


def _read(kind: type[T], entry: Any, path: Path, **kinds: type) -> T:
    """A ``kind`` from its JSON; other keys are left out."""
    checked = as_object(entry, path, REMEDY, name=str, ended_by=str, **kinds)
    return kind(**{name: checked[name] for name in ("name", "ended_by", *kinds)})


def settings_of(stage: Stage) -> dict[str, Any]:
    """The settings that make a stage what it is, as JSON keeps them."""
    flat = {**flat_config(stage.cfg), **{f"stage.{key}": value for key, value in to_dict(stage.knobs).items()}}
    found: dict[str, Any] = json.loads(json.dumps({key: v for key, v in flat.items() if not _is_no_change(key)}))
    return found


def _is_no_change(key: str) -> bool:
    return any(key == knob or key.startswith(f"{knob}.") for knob in NO_CHANGE)


def check_unchanged(finished: Sequence[FinishedStage], stages: Sequence[Stage]) -> None:
    """Raise a UserError if the recipe does not begin with the finished stages as they were made."""
    for number, done in enumerate(finished):
        stage = stages[number] if number < len(stages) else None
        if stage is None or (stage.name, stage.method) != (done.name, done.method):
            now = "no stage" if stage is None else f"{stage.name} ({stage.method})"
            raise UserError(
                f"stage {number + 1} of this run is finished and was {done.name} ({done.method}), now it is {now}; "
                "set it as it was, or choose another name="
            )
        settings, defaults = settings_of(stage), flat_config(Config())
        keys = sorted(settings.keys() | {key for key in done.settings if not _is_no_change(key)})
        before = {key: done.settings.get(key, defaults.get(key)) for key in keys}
        changed = [f"{key} {before[key]} -> {settings.get(key)}" for key in keys if before[key] != settings.get(key)]
        if changed:
            raise UserError(
                f"stage {done.name} is finished, and {', '.join(changed[:3])} would change it; set that for a later "
                f"stage alone (stages.NAME.section.key=value), or choose another name="
            )
