"""Settings and plugins of a run on disk: those in use, those before a resume changed them, and what it changed."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from luffy.config import Config, to_yaml
from luffy.errors import UserError
from luffy.files import write_atomically
from luffy.guidance.ratios import SCHEDULES
from luffy.plugins import load_plugins
from luffy.run_folder.layout import BEST, CONFIG, DATA, EVAL_SAMPLES, EVALUATED, METRICS, SAMPLES, SAVED, STAGES, WANDB
from luffy.run_folder.runs import flat_config, is_number, read_config

Changes = dict[str, tuple[Any, Any]]
RECORDS = (EVALUATED, SAVED, STAGES, CONFIG, BEST, WANDB, SAMPLES, EVAL_SAMPLES, METRICS)  # of one training
IGNORED = {"out", "name"}  # where the run folder is
LENGTH = {"train.steps", "train.epochs"}  # ignored unless a schedule depends on it
# Settings that decide what a held-out accuracy measures, with those below them.
MEASURE = (
    "data.eval", "data.eval_split", "data.format", "data.columns", "data.style", "data.system_prompt",
    "data.chat_template", "data.special_tokens", "eval.limit", "eval.n", "eval.temperature", "eval.top_p",
    "eval.max_tokens", "reward.kind", "reward.weights", "reward.http.url", "reward.answer_in_thought",
    "reward.prompt_opens_thought", "reward.success", "reward.cut_off",
)  # fmt: skip
PLUGINS = "plugins"


def settings_at(folder: Path, step: float) -> Path:
    """The file with the settings that a step was made with."""
    return _at(folder / CONFIG, step)


def _before(file: Path, step: int) -> Path:
    """Where settings, or a plugin's source, of the steps up to ``step`` are kept when a resume changes them."""
    return file.with_stem(f"{file.stem}-step-{step:06d}")


def _kept(file: Path) -> dict[int, Path]:
    """What the file was before, by the last step that was made with it, in order."""
    begin = f"{file.stem}-step-"
    found = {path.stem.removeprefix(begin): path for path in file.parent.glob(f"{begin}*{file.suffix}")}
    return dict(sorted((int(last), path) for last, path in found.items() if last.isdecimal()))


def _at(file: Path, step: float) -> Path:
    return next((path for last, path in _kept(file).items() if last >= step), file)


def _forget_later(file: Path, step: int) -> None:
    for last, path in _kept(file).items():
        if last > step:
            path.unlink()  # of steps that are made anew


def changes_of(folder: Path, through_step: float = math.inf) -> list[tuple[int, Changes]]:
    """Changes of the resumes up to a step, as (last step before, changes), in order; damaged files are left out."""
    kept = {step: path for step, path in _kept(folder / CONFIG).items() if step < through_step}
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
    """{key: (before, now)} of two flat configs; none if one is empty. A setting that an old record does not know had
    its default."""
    if not before or not now:
        return {}
    before, now = _without_empty(before), _without_empty(now)
    spared = IGNORED if _follows_length(now) else IGNORED | LENGTH
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

    guided = number("guidance.n_prefix") > 0 and SCHEDULES.known(str(settings.get("guidance.strategy"))).follows_steps
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


def compare(cfg: Config, method: str, step: int, origin: Path) -> tuple[Changes, list[str]]:
    """What differs from the settings and plugins that the steps of ``origin`` up to ``step`` were made with: the
    settings, and lines for the user."""
    changes: Changes = {}
    with suppress(UserError):  # a damaged record says nothing
        changes = changed(read_config(settings_at(origin, step)), flat_config(cfg))
    since = f"since step {step}" + (f" of {origin}" if origin != cfg.folder else "")
    notices = []
    if changes:
        kept = f"the settings before are in {_before(cfg.folder / CONFIG, step)}"
        notices.append(f"settings changed {since}: {in_words(changes, cfg, method)} ({kept})")
    for name in changed_plugins(cfg, step, origin):
        source = _before(cfg.folder / PLUGINS / f"{name}.py", step)
        notices.append(f"plugin {name} changed {since} (its source before is in {source})")
    return changes, notices


def in_words(changes: Changes, cfg: Config, method: str) -> str:
    """The changes, and what they mean for the run of ``cfg``."""
    shown = ", ".join(f"{key} {_short(before)} -> {_short(now)}" for key, (before, now) in changes.items())
    notes = [_of_other_path(cfg, method)] * ("model.path" in changes)
    notes += ["schedules follow the length of the run"] * bool(LENGTH & changes.keys())
    anew = cfg.train.keep_best and measures_otherwise(changes, cfg)
    notes += ["held-out accuracies are measured otherwise than before: the best step is found anew"] * anew
    return "; ".join([shown, *notes])


def measures_otherwise(changes: Changes, cfg: Config) -> bool:
    """Whether held-out accuracies after the changes cannot be compared with those before."""

    def counts(key: str) -> bool:
        key = re.sub(r"^stages\.[^.]+\.", "", key)
        if key == "rollout.max_tokens":
            return cfg.eval.max_tokens is None
        return any(key == knob or key.startswith(f"{knob}.") for knob in MEASURE)

    return cfg.data.eval is not None and any(map(counts, changes))


def _of_other_path(cfg: Config, method: str) -> str:
    """What a changed ``model.path`` means for a resumed run."""
    if cfg.model.lora is not None:
        return "the adapters stay the checkpoint's, the model below them is that of model.path"
    kl = method == "rl" and cfg.algorithm.kl_coef > 0 and cfg.model.reference is None
    taught = method == "rl" and cfg.teacher.is_self and not cfg.teacher.average
    read = ["the reference of the KL term"] * kl + ["the teacher (teacher.path=self)"] * taught
    return "the weights stay the checkpoint's" + "".join(f"; {part} is now the model of model.path" for part in read)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Start:
    """How a process takes up a run. ``data``: the content of data.json. ``origin``: the run folder of the checkpoint
    that it resumes from, its own or another run's. ``changes``: settings that differ from those before. ``recipe``: the
    settings to keep on record, of a run with stages those of all."""

    data: Mapping[str, Any]
    recipe: Config
    origin: Path | None = None
    changes: Changes = field(default_factory=dict)


def write_settings(cfg: Config, step: int, start: Start) -> None:
    """Write config.yaml, data.json and the plugins of a run that begins after ``step``. Settings that a resume changed
    are kept under another name. A branch takes those of the run it came from."""
    folder, origin = cfg.folder, start.origin
    if origin not in (None, folder):
        _take_over(origin, folder, step)
    kept = _before(folder / CONFIG, step)
    if start.changes and not kept.exists():  # else an earlier resume at this step kept them
        assert origin is not None
        write_atomically(kept, settings_at(origin, step).read_text(encoding="utf-8"))
    write_atomically(folder / CONFIG, to_yaml(cfg))
    _forget_later(folder / CONFIG, step)
    write_atomically(folder / DATA, json.dumps(start.data, indent=1) + "\n")
    _write_plugins(cfg, step, changed_plugins(cfg, step, origin or folder))


def _take_over(origin: Path, folder: Path, step: int) -> None:
    """Replace the kept settings in ``folder`` by those that ``origin`` had before those of ``step``."""
    for path in _kept(folder / CONFIG).values():
        path.unlink()
    for last, path in _kept(origin / CONFIG).items():
        if last < step:
            shutil.copyfile(path, folder / path.name)


def _write_plugins(cfg: Config, step: int, changed: Mapping[str, str]) -> None:
    """Write each plugin's source; one that was changed keeps the source before under another name."""
    for module in load_plugins(cfg.plugins):
        file = cfg.folder / PLUGINS / f"{module.__name__}.py"
        file.parent.mkdir(exist_ok=True)
        _forget_later(file, step)
        if module.__name__ in changed:
            write_atomically(_before(file, step), changed[module.__name__])
        write_atomically(file, _source_of(module))


def changed_plugins(cfg: Config, step: int, origin: Path) -> dict[str, str]:
    """Earlier sources, by name, of the plugins that differ from those of step ``step`` in the run folder ``origin``."""
    found = {}
    for module in load_plugins(cfg.plugins):
        record = _at(origin / PLUGINS / f"{module.__name__}.py", step)
        if record.exists() and (before := record.read_text(encoding="utf-8")) != _source_of(module):
            found[module.__name__] = before
    return found


def _source_of(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def set_records_aside(folder: Path, step: int) -> list[str]:
    """Before a training from step 1, or from another run's checkpoint of ``step``: records of an earlier one in its
    folder get other names. Returns a line for the user, if there were any."""
    found = [*_kept(folder / CONFIG).values(), *(folder / name for name in RECORDS if (folder / name).exists())]
    if not any(path.suffix == ".jsonl" and path.stat().st_size for path in found):
        return []
    number = next(n for n in count(1) if not any(folder.glob(f"*.earlier-{n}.*")))
    for path in found:
        path.rename(path.with_name(f"{path.stem}.earlier-{number}{path.suffix}"))
    kept = f"the records of an earlier training in {folder} are kept as *.earlier-{number}.*"
    return [f"begins at step {step + 1}; {kept}"]
