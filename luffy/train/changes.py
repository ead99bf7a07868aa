"""What a resumed run is asked to do that it did not do before."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from luffy.config import Config
from luffy.errors import UserError
from luffy.report.runs import CONFIG, flat_config, read_config

Changes = dict[str, tuple[Any, Any]]
OF_NO_CONSEQUENCE = {"out", "name"}  # where it lies
LENGTH = {"train.steps", "train.epochs"}  # how far it goes: of no consequence unless a schedule follows it


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
    spared = OF_NO_CONSEQUENCE if follows_length(cfg) else OF_NO_CONSEQUENCE | LENGTH
    keys = sorted((before.keys() | now.keys()) - spared) if before else []
    first = _without_empty(flat_config(Config())) | before
    return {key: (first.get(key), now.get(key)) for key in keys if first.get(key) != now.get(key)}


def follows_length(cfg: Config) -> bool:
    """Whether a schedule is spread over the whole training, so that a longer one changes every step of it."""
    o, g, mix, second = cfg.optim, cfg.guidance, cfg.algorithm.mix, cfg.rollout.overrides
    prefixes = g.n_prefix > 0 and g.strategy not in ("fixed", "random") and (g.prefix_steps or 0) < 1
    overrides = second is not None and (
        (second.tau_end is not None and second.tau_steps is None)
        or (second.eps_end is not None and second.eps_steps is None)
    )
    mixed = mix is not None and mix.end is not None and mix.steps is None
    return o.schedule != "constant" or 0 < o.warmup < 1 or prefixes or mixed or overrides


def _without_empty(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value != {}}


def in_words(changes: Changes, cfg: Config, method: str) -> str:
    """The changes, and what follows from them for the run of ``cfg``."""
    shown = ", ".join(f"{key} {_short(before)} -> {_short(now)}" for key, (before, now) in changes.items())
    notes = [_of_other_path(cfg, method)] * ("model.path" in changes)
    notes += ["schedules follow the length of the run"] * bool(LENGTH & changes.keys())
    return "; ".join([shown, *notes])


def _of_other_path(cfg: Config, method: str) -> str:
    """What another ``model.path`` means for a run that has weights of its own."""
    if cfg.model.lora is not None:
        return "the adapters stay the checkpoint's, the model below them is that of model.path"
    kl = method == "rl" and cfg.algorithm.kl_coef > 0 and cfg.model.reference is None
    taught = method == "rl" and cfg.teacher.is_self and not cfg.teacher.average
    read = ["the reference of the KL term"] * kl + ["the teacher (teacher.path=self)"] * taught
    return "the weights stay the checkpoint's" + "".join(f"; {part} is now the model of model.path" for part in read)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
