"""Which runs the study has: a built-in recipe, a task laid over it, and what the question changes.

python studies/gsm8k/plan.py          lists them
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from luffy.config import Config, read_recipe
from luffy.config.legacy import merge, set_at
from luffy.schema import build

HERE = Path(__file__).parent
TASKS = ("stories", "gsm8k")
SEEDS = (0, 1, 2)
GAMMAS = (0.05, 0.1, 0.2, 0.3, 0.5)
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
TUNING_STEPS = 25
AT_THE_END = ("eval.every", 0)  # evaluate only then, where no table or figure shows what was before
ITS_OWN_TEST = {"stories": (), "gsm8k": (("data.eval_also", {}),)}  # where no table shows the other sets


@dataclass(frozen=True)
class Method:
    """A built-in recipe, and where the study asks for something no recipe has, what it sets besides."""

    recipe: str
    kind: Literal["rl", "sft"] = "rl"
    sets: tuple[tuple[str, Any], ...] = ()
    after: str | None = None  # the method whose model it starts from


METHODS = {
    "on_policy": Method("smollm2/on_policy"),
    "sft": Method("smollm2/sft", "sft", (("train.steps", 120), ("eval.every", 60), ("batch.mini_batch", None))),
    "rl_sft_loss": Method("smollm2/rl_sft_loss"),
    "sft_rl": Method("smollm2/on_policy", after="sft"),
    "mixed": Method("smollm2/mixed"),
    "mixed_shaping": Method("smollm2/luffy_clip"),
    "luffy": Method("smollm2/luffy"),
    "on_policy_shaping": Method("smollm2/on_policy", sets=(("algorithm.on_policy_reshape", "p_div_p_0.1"),)),
    "on_policy_no_clip": Method("smollm2/on_policy", sets=(("algorithm.remove_clip", True),)),
}
METHODS |= {
    f"luffy_gamma_{gamma}": Method("smollm2/luffy", sets=(("algorithm.off_policy_reshape", f"p_div_p_{gamma}"),))
    for gamma in GAMMAS
}
MAIN = ("on_policy", "sft", "rl_sft_loss", "sft_rl", "mixed", "luffy")
ABLATION = ("mixed_shaping", "on_policy_shaping", "on_policy_no_clip")

# What was tried for each method (question "tune"), every one for the same number of optimizer steps.
TRIED: dict[str, tuple[float, ...]] = {
    "on_policy": (1e-5, 3e-5, 1e-4),
    "sft": (3e-5, 1e-4, 3e-4),
    "rl_sft_loss": (1e-5, 3e-5, 1e-4),
    "sft_rl": (3e-6, 1e-5, 3e-5),
    "mixed": (1e-5, 3e-5, 1e-4),
    "luffy": (1e-5, 3e-5, 1e-4),
}
# The best of them on the stories, as `run.py --questions tune` found; a variant of a method takes the method's.
CHOSEN: dict[str, float] = json.loads((HERE / "rates.json").read_text(encoding="utf-8"))


def family(method: str) -> str:
    """The method whose learning rate this one takes."""
    return next(name for name in sorted(CHOSEN, key=len, reverse=True) if method.startswith(name))


@dataclass(frozen=True)
class Run:
    question: str
    task: str
    method: str
    seed: int
    lr: float
    sets: tuple[tuple[str, Any], ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        parts = [self.question, self.task, self.method, self.note, f"s{self.seed}"]
        return "-".join(part for part in parts if part)

    @property
    def kind(self) -> Literal["rl", "sft"]:
        return METHODS[self.method].kind

    @property
    def start(self) -> str | None:
        """The run whose model this one begins with."""
        before = METHODS[self.method].after
        if before is None:
            return WARM.name if self.question == "warm" and self != WARM else None
        if self.question == "tune":
            return Run("tune", self.task, before, 0, CHOSEN[before], note=f"lr{CHOSEN[before]:g}").name
        return Run(self.question, self.task, before, self.seed, CHOSEN[before]).name

    def config(self, data: Path, model: str, out: Path) -> Config:
        method = METHODS[self.method]
        task = yaml.safe_load((HERE / "tasks" / f"{self.task}.yaml").read_text(encoding="utf-8"))
        values = merge(read_recipe(method.recipe), task)
        for key, value in (*method.sets, *self.sets, ("optim.lr", self.lr), ("seed", self.seed)):
            set_at(values, key.split("."), value)
        values["data"] = {**values["data"], **_paths(values["data"], data)}
        start = model if self.start is None else str(out / self.start / "model")
        values["model"] = {**values["model"], "path": start}
        return build(Config, {**values, "name": self.name, "out": str(out)})


# A base that can do a third of the stories: SFT, short and slow, on others than those of the training set.
WARM = Run("warm", "stories", "sft", 0, 3e-5, (("train.steps", 50), ("data.train", "stories-warm.jsonl")), "base")


def _paths(sets: dict[str, Any], data: Path) -> dict[str, Any]:
    also = {name: str(data / file) for name, file in sets["eval_also"].items()}
    return {"train": str(data / sets["train"]), "eval": str(data / sets["eval"]), "eval_also": also}


def tune() -> Iterator[Run]:
    """SFT first: a method starts from its model."""
    for method in sorted(TRIED, key=lambda name: name != "sft"):
        for lr in TRIED[method]:
            steps = 2 * TUNING_STEPS if method == "sft" else TUNING_STEPS  # as many optimizer steps
            sets = (("train.steps", steps), ("eval.every", 0))
            yield Run("tune", "stories", method, 0, lr, sets, f"lr{lr:g}")


def main() -> Iterator[Run]:
    for task in TASKS:
        for seed in SEEDS:
            sets = (AT_THE_END,) if task == "gsm8k" and seed else ()
            for method in sorted(MAIN, key=lambda name: name != "sft"):
                yield Run("main", task, method, seed, CHOSEN[family(method)], sets)


def ablation() -> Iterator[Run]:
    for task in TASKS:
        for seed in SEEDS:
            for method in ABLATION:
                sets = (AT_THE_END, *ITS_OWN_TEST[task])
                yield Run("ablation", task, method, seed, CHOSEN[family(method)], sets)


def gamma() -> Iterator[Run]:
    for task in TASKS:
        for seed in SEEDS:
            for value in GAMMAS:
                if value != 0.1:  # that is LUFFY itself
                    sets = (AT_THE_END, *ITS_OWN_TEST[task])
                    yield Run("gamma", task, f"luffy_gamma_{value}", seed, CHOSEN["luffy"], sets)


def entropy() -> Iterator[Run]:
    """With the paper's entropy bonus, and a tenth of it."""
    for coefficient in (0.01, 0.001):
        for method in ("luffy", "mixed", "on_policy"):
            sets = (("algorithm.entropy_coef", coefficient), AT_THE_END)
            yield Run("entropy", "stories", method, 0, CHOSEN[method], sets, f"h{coefficient:g}")


def split() -> Iterator[Run]:
    """Only short or only long problems to learn from; GSM8K's test problems are split like those to train on."""
    held_out = {"stories": (), "gsm8k": (("data.eval", "gsm8k-easy.jsonl"),
                                         ("data.eval_also", {"hard": "gsm8k-hard.jsonl"}))}  # fmt: skip
    for task in TASKS:
        for seed in SEEDS:
            for method in ("on_policy", "luffy"):
                for part in ("easy", "hard"):
                    sets = (("data.train", f"{task}-train-{part}.jsonl"), AT_THE_END, *held_out[task])
                    yield Run("split", task, method, seed, CHOSEN[method], sets, part)


def warm() -> Iterator[Run]:
    """Question 1 once more, from a base that already has some of the skill, as the paper's has."""
    yield WARM
    for seed in SEEDS:
        for method in sorted(MAIN, key=lambda name: name != "sft"):
            yield Run("warm", "stories", method, seed, CHOSEN[family(method)], (AT_THE_END,))


PLAN: dict[str, Callable[[], Iterator[Run]]] = {
    "tune": tune, "main": main, "ablation": ablation, "entropy": entropy, "gamma": gamma, "split": split,
    "warm": warm,
}  # fmt: skip

if __name__ == "__main__":
    for run in (run for question in PLAN.values() for run in question()):
        print(run.name, f"lr={run.lr:g}", *(f"{key}={value}" for key, value in run.sets))
