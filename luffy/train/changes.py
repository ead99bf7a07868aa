"""What a resumed run is asked to do that it did not do before."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from luffy.config import Config
from luffy.errors import UserError
from luffy.report.changes import LENGTH, Changes, changed, settings_at
from luffy.report.runs import flat_config, read_config

# What decides the meaning of a held-out accuracy: these knobs, and those below them.
MEASURE = (
    "data.eval", "data.eval_split", "data.format", "data.columns", "data.style", "data.system_prompt",
    "data.chat_template", "data.special_tokens", "eval.limit", "eval.n", "eval.temperature", "eval.top_p",
    "eval.max_tokens", "reward.kind", "reward.weights", "reward.http.url", "reward.answer_in_thought",
    "reward.prompt_opens_thought", "reward.success",
)  # fmt: skip


def changed_settings(folder: Path, step: int, cfg: Config) -> Changes:
    """Settings that the steps up to ``step`` were made with otherwise: {key: (before, now)}."""
    with suppress(UserError):  # a damaged record says nothing
        return changed(read_config(settings_at(folder, step)), flat_config(cfg))
    return {}


def in_words(changes: Changes, cfg: Config, method: str) -> str:
    """The changes, and what follows from them for the run of ``cfg``."""
    shown = ", ".join(f"{key} {_short(before)} -> {_short(now)}" for key, (before, now) in changes.items())
    notes = [_of_other_path(cfg, method)] * ("model.path" in changes)
    notes += ["schedules follow the length of the run"] * bool(LENGTH & changes.keys())
    anew = cfg.train.keep_best and measures_otherwise(changes, cfg)
    notes += ["held-out accuracies are measured otherwise than before: the best step is found anew"] * anew
    return "; ".join([shown, *notes])


def measures_otherwise(changes: Changes, cfg: Config) -> bool:
    """Whether a held-out accuracy of the run of ``cfg`` is another figure than those before the changes."""

    def counts(key: str) -> bool:
        if key == "rollout.max_tokens":
            return cfg.eval.max_tokens is None
        return any(key == knob or key.startswith(f"{knob}.") for knob in MEASURE)

    return cfg.data.eval is not None and any(map(counts, changes))


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
