"""Stages of a run: which there are, when each ends, and the config that each is trained with.

    stages:
      sft: {method: sft, until: flat_loss, hand_on: best, eval: {hold_out: 64}, optim: {lr: 1e-5}}
      rl: {}

A stage is named, may name recipes as its ``base``, and has settings of its own (``StageKnobs``). All other keys are
sections of a recipe, laid over those of the run. A list of mappings with a ``name`` each is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from luffy.config.checks import Config
from luffy.config.legacy import merge, with_current_keys
from luffy.errors import ConfigError
from luffy.schema import build, knob, to_dict

Method = Literal["rl", "sft"]
OF_THE_RUN = ("out", "seed", "plugins", "launch", "parallel", "ray")  # the same in every stage


@dataclass(frozen=True)
class StageKnobs:
    method: Literal["rl", "sft"] | None = knob(None, "rl or sft; null: what its base is made for, else rl")
    until: Literal["steps", "flat_loss", "flat_accuracy"] = knob(
        "steps",
        "ends after train.steps or train.epochs, or earlier if the held-out loss of traces (eval.hold_out, "
        "data.eval_traces) or the accuracy on data.eval no longer improves",
    )
    patience: int = knob(3, "evaluations in a row without an improvement that end a flat stage", ge=1)
    min_delta: float = knob(0.0, "smallest change of the loss or accuracy that counts as an improvement", ge=0)
    seconds: float | None = knob(None, "ends after so many seconds of steps and evaluations; null: no limit", gt=0)
    hand_on: Literal["last", "best"] = knob("last", "checkpoint that the next stage begins with; best: by until")


@dataclass(frozen=True)
class Stage:
    """A stage of a run. ``number`` counts from 1; ``cfg`` is the config that it is trained with."""

    name: str
    number: int
    method: Method
    knobs: StageKnobs
    cfg: Config = field(repr=False)

    @property
    def by_loss(self) -> bool:
        """Whether the held-out loss decides which step is the best; else the accuracy does."""
        return self.knobs.until == "flat_loss"

    @property
    def ending(self) -> str:
        """When the stage ends, in words."""
        t, k = self.cfg.train, self.knobs
        ends = [f"{t.steps} steps" if t.steps is not None else f"{t.epochs} epochs"]
        if k.until != "steps":
            measure = "loss" if self.by_loss else "accuracy"
            ends.append(f"{k.patience} evaluation{'s' * (k.patience > 1)} without a better held-out {measure}")
        ends += [] if k.seconds is None else [f"{k.seconds:g} seconds"]
        return f"ends after {', or '.join(ends)}"


def by_name(stages: Any) -> dict[str, Any]:
    """``stages`` of a recipe as a mapping of names."""
    if stages is None:
        return {}
    if isinstance(stages, list | tuple):
        named = [dict(stage) if isinstance(stage, Mapping) else {} for stage in stages]
        names = [stage.pop("name", None) for stage in named]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ConfigError("'stages' as a list needs mappings, each with a 'name' of its own")
        return dict(zip(map(str, names), named, strict=True))
    if not isinstance(stages, Mapping):
        raise ConfigError(f"'stages' must be a mapping of names, got {stages!r}")
    return {str(name): {} if stage is None else stage for name, stage in stages.items()}


def stages_of(config: Config) -> tuple[Stage, ...]:
    """The checked stages of a run; none if it is a plain one."""
    found = []
    for number, (name, values) in enumerate(config.stages.items(), 1):
        try:
            found.append(_stage(config, name, number, values))
        except ConfigError as error:
            raise ConfigError(f"stage {name!r}: {error}") from None
    return tuple(found)


def _stage(config: Config, name: str, number: int, values: Any) -> Stage:
    if not re.fullmatch(r"\w[\w-]*", name):
        raise ConfigError("a name has letters, digits, '-' and '_' only")
    if not isinstance(values, Mapping):
        raise ConfigError(f"must be a mapping of settings, got {values!r}")
    own = {f.name for f in fields(StageKnobs)}
    knobs = build(StageKnobs, {key: value for key, value in values.items() if key in own})
    settings = {key: value for key, value in values.items() if key not in own}
    method: Method = knobs.method or settings.get("made_for", "rl")
    laid_over = {key: value for key, value in settings.items() if key not in ("name", "base", "stages", "made_for")}
    below = with_current_keys(to_dict(replace(config, stages={}, made_for=method)))
    stage = Stage(name, number, method, knobs, build(Config, merge(below, with_current_keys(laid_over))))
    _check_of_the_run(config, stage.cfg)
    _check_ending(stage)
    return stage


def _check_of_the_run(config: Config, stage: Config) -> None:
    for key in OF_THE_RUN:
        if getattr(stage, key) != getattr(config, key):
            raise ConfigError(f"'{key}' is the same in all stages; set it at the top of the recipe")
    if stage.model.path != config.model.path:
        raise ConfigError("'model.path' is that of the run, and then the checkpoint that is handed on; leave it out")


def _check_ending(stage: Stage) -> None:
    cfg, k = stage.cfg, stage.knobs
    if k.until != "steps" and not cfg.eval.every:
        raise ConfigError(f"'until' ({k.until}) looks at evaluations, and 'eval.every' is 0; set it")
    if stage.by_loss and not cfg.eval.hold_out and cfg.data.eval_traces is None:
        raise ConfigError("'until' (flat_loss) needs held-out traces; set eval.hold_out, or data.eval_traces")
    if not stage.by_loss and cfg.data.eval is None and (k.until == "flat_accuracy" or k.hand_on == "best"):
        asks = "'until' (flat_accuracy)" if k.until == "flat_accuracy" else "'hand_on' (best)"
        raise ConfigError(f"{asks} needs held-out problems; set data.eval")
    if k.hand_on == "best" and not cfg.train.keep_best:
        raise ConfigError("'hand_on' (best) needs the best checkpoint; set train.keep_best=true")
