"""The commands of an arm: its training, its evaluations, and the files of both in the output folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from luffy.compare.arms import Arm
from luffy.compare.process import Job, luffy
from luffy.config import to_yaml
from luffy.evaluation.accuracy import item_accuracy
from luffy.evaluation.results import read_items
from luffy.files import write_atomically


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
