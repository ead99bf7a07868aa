"""The arms of a comparison: every method at every learning rate, on the user's model and data; and the commands that
train and evaluate one, with its files in the output folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.compare.held_out import Split
from luffy.compare.process import Job, luffy
from luffy.config import Config, Method, built_in_recipes, read_recipe, to_yaml
from luffy.config.legacy import merge
from luffy.config.recipes import config_of
from luffy.errors import ConfigError, UserError
from luffy.evaluation.accuracy import item_accuracy
from luffy.evaluation.results import read_items
from luffy.files import write_atomically
from luffy.report.methods import SECOND_STAGE, SECTIONS, closest_recipe
from luffy.run_folder.runs import flat_config
from luffy.schema import nearest, to_dict

FACTORS = (1.0, 3.0)  # of the recipe's learning rate, where none are given
OF_METHODS = ("algorithm", "guidance", "teacher", "replay", "sft_steps", "stages", "made_for", "prepare")


@dataclass(frozen=True)
class Arm:
    """A method at a learning rate, with a seed. ``candidate`` is what its seeds share."""

    method: str
    lr: float
    seed: int
    cfg: Config

    @property
    def candidate(self) -> str:
        return f"{self.method.replace('_', '-')}-lr{self.lr:g}"

    @property
    def name(self) -> str:
        return f"{self.candidate}-s{self.seed}"

    @property
    def trained_by(self) -> Method:
        return self.cfg.made_for


def arms_of(
    cfg: Config, methods: Sequence[str], lrs: Sequence[float], seeds: int, split: Split, folder: Path
) -> list[Arm]:
    """All arms; a UserError names the method that the recipe cannot be trained with."""
    rates = list(lrs) or [factor * cfg.optim.lr for factor in FACTORS]
    found = []
    for method in methods:
        for lr in rates:
            for seed in range(cfg.seed, cfg.seed + seeds):
                arm = Arm(method, lr, seed, cfg)
                values = method_values(cfg, method)
                values["data"] |= data_values(split)
                values |= {"out": str(folder), "name": arm.name, "seed": seed}
                values["optim"]["lr"] = lr
                try:
                    found.append(Arm(method, lr, seed, config_of(values)))
                except ConfigError as error:
                    raise UserError(f"--methods {method}: {error}") from None
    return found


def data_values(split: Split) -> dict[str, Any]:
    return {
        "train": str(split.train), "eval": str(split.validation), "eval_also": {}, "split": "train",
        "eval_split": "test", "format": "luffy", "columns": {}, "limit": None,
    }  # fmt: skip


def method_values(cfg: Config, method: str) -> dict[str, Any]:
    """The user's recipe with another method: what sets the user's settings apart from the built-in method closest to
    them stays, unless the method says otherwise."""
    values, defaults = to_dict(cfg), to_dict(Config())
    own, others = closest_recipe(flat_config(cfg), sft=cfg.made_for == "sft")
    if own == "on_policy" and cfg.stages:
        own = SECOND_STAGE
    if method.replace("-", "_") == own:
        return dict(values)
    for section in OF_METHODS:
        values[section] = defaults[section]
    values["batch"]["expert_share"] = defaults["batch"]["expert_share"]
    values["rollout"]["offpolicy_guidance"] = None
    for key, value in others.items():
        if key.startswith(SECTIONS) and "offpolicy" not in key:
            place, _, name = key.rpartition(".")
            if isinstance(values.get(place), dict):
                values[place][name] = value
    laid_over = {key: value for key, value in read_recipe(f"methods/{method}").items() if key != "name"}
    return merge(values, laid_over)


def named_methods(text: str) -> list[str]:
    """Names of method recipes, separated by commas."""
    known = [name.removeprefix("methods/") for name in built_in_recipes() if name.startswith("methods/")]
    named = list(dict.fromkeys(name.strip().replace("-", "_") for name in text.split(",") if name.strip()))
    for name in named:
        if name not in known:
            raise UserError(f"--methods: no method {name!r}{nearest(name, known) or '; there are ' + ', '.join(known)}")
    if not named:
        raise UserError("--methods names none")
    return named


def restored(cfg: Config, arm: Arm, name: str) -> Mapping[str, Any]:
    """The arm's recipe on all of the user's data, for a training of its own."""
    values = to_dict(arm.cfg)
    values["data"] = to_dict(cfg.data)
    return {**values, "out": cfg.out, "name": name, "seed": cfg.seed}


def recipe_of(out: Path, arm: Arm) -> Path:
    return out / "recipes" / f"{arm.name}.yaml"


def log_of(out: Path, arm: Arm) -> Path:
    return out / "recipes" / f"{arm.name}.log"


def write_recipes(out: Path, arms: Sequence[Arm]) -> None:
    (out / "recipes").mkdir(parents=True, exist_ok=True)
    for arm in arms:
        write_atomically(recipe_of(out, arm), to_yaml(arm.cfg))


def training(out: Path, arm: Arm, patience: float, target: float) -> Job:
    """Ends when the arm has spent ``target`` seconds."""
    command = luffy("sft" if arm.trained_by == "sft" else "train", str(recipe_of(out, arm)))
    return Job(command, log_of(out, arm), patience, arm.cfg.folder, target)


def evaluation(out: Path, arm: Arm, data: Path, name: str, patience: float) -> Job:
    """The evaluation of the arm's best checkpoint, sampled as in its training's evaluations."""
    e = arm.cfg.eval
    options = {
        "suite": data, "out": arm.cfg.folder / "evals" / name, "reward-of": recipe_of(out, arm), "k": e.n,
        "temperature": e.temperature, "top-p": e.top_p, "max-tokens": e.max_tokens or arm.cfg.rollout.max_tokens,
        "device": arm.cfg.model.device,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return Job(luffy("eval", str(arm.cfg.folder), *words), log_of(out, arm), patience)


def accuracies(arm: Arm, name: str) -> dict[str, float]:
    """By problem, of a finished evaluation."""
    return item_accuracy(read_items(arm.cfg.folder / "evals" / name))
