"""Trackers: where metrics go besides metrics.jsonl. TensorBoard, Weights & Biases, and those of plugins.

A tracker has ``log(step, values)`` and ``close()``; a recipe names it in ``record.trackers``.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from luffy.config import Config
from luffy.config.parts import TRACKERS
from luffy.errors import ConfigError, how_to_install
from luffy.files import json_object, write_atomically
from luffy.registry import NoSettings
from luffy.run_folder.layout import WANDB
from luffy.schema import Chosen, knob, to_dict


class Tracker(Protocol):
    """Takes the metrics of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def tracker(
    name: str,
    settings: type = NoSettings,
    package: str = "",
    optional: bool = False,
    title: str = "",
    fault: Callable[[], str | None] | None = None,
) -> Callable[[Callable[..., Tracker]], Callable[..., Tracker]]:
    """Register ``build(cfg, start_step) -> tracker``, a function or class, for ``record.trackers``. Settings are a
    third argument.

    The tracker has ``log(step, values)`` and ``close()``; ``start_step`` is the last recorded step. A tracker that
    fails is switched off with a warning. ``package``: what must be installed, or the run does not start
    (``optional``: it runs without the tracker). ``fault()``: what else is missing, or None. ``title``: its name in
    messages.
    """
    facts = {"package": package, "optional": optional, "title": title, "fault": fault}
    return TRACKERS.register(name, settings=settings, **facts)


def start_tracker(chosen: Chosen, cfg: Config, start_step: int) -> Tracker:
    """The tracker that the config names, with its settings."""
    part = TRACKERS.find(chosen, "record.trackers")
    started: Tracker = part(cfg, start_step, *part.settings_for(chosen))
    return started


def missing_package(chosen: Chosen) -> str:
    """The package that a tracker needs and that is not installed, else nothing."""
    package: str = chosen.part.package
    try:
        return package if package and find_spec(package) is None else ""
    except ValueError:  # imported from elsewhere
        return ""


def check_trackers(cfg: Config) -> list[str]:
    """Before the first step: a tracker must be installed and ready, else a ConfigError says what is missing. An
    optional one may be missing, and a line about it is returned."""
    notices = []
    for chosen in cfg.record.chosen_trackers:
        title, package = chosen.part.title or chosen, missing_package(chosen)
        if package and chosen.part.optional:
            notices.append(f"{title} is off: the package {package} is missing (record.{chosen})")
            continue
        install = how_to_install(package) if chosen.part.is_built_in else f"pip install {package}"
        fault = f"the package {package} is missing: {install}" if package else None
        if fault is None and chosen.part.fault is not None:
            fault = chosen.part.fault()
        if fault:
            asked = f"record.trackers names {chosen}" if chosen in cfg.record.trackers else f"record.{chosen}=true"
            raise ConfigError(f"{asked}, but {fault}")
    return notices


@tracker("tensorboard", package="tensorboard", optional=True, title="TensorBoard")
class TensorBoardTracker:
    """Events in the folder ``tensorboard`` of the run."""

    def __init__(self, cfg: Config, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(cfg.folder / "tensorboard"), purge_step=start_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class Wandb:
    project: str = knob("luffy", "W&B project")


def _wandb_fault() -> str | None:
    """Why W&B cannot be used."""
    import wandb

    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return None
    api = getattr(wandb, "api", None)
    if api is not None and not api.api_key:
        return "nobody is logged in: run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline"
    return None


@tracker("wandb", settings=Wandb, package="wandb", title="W&B", fault=_wandb_fault)
class WandbTracker:
    """A run of Weights & Biases that resumes under the same id."""

    def __init__(self, cfg: Config, start_step: int, settings: Wandb) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=settings.project,
            name=cfg.name,
            id=_wandb_id(cfg.folder / WANDB),
            resume="allow",
            config=to_dict(cfg),
        )
        # Steps are an axis of our own: of W&B's, which only counts upwards, a resumed run could not record an
        # evaluation that it makes up for at the step where it stopped.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(path: Path) -> str:
    """The run's id, drawn once: folders of the same name may write to one project."""
    if not path.exists():
        write_atomically(path, json.dumps({"id": secrets.token_hex(8)}))
    return str(json_object(path.read_bytes(), path, "delete it, and W&B begins another run", id=str)["id"])
