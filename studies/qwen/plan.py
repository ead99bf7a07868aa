"""Which runs the study has, in the order of their importance.

    python -m studies.qwen.plan          lists them

A contest is the tuning of a method: one run for each of three learning rates. At the steps of ``RUNGS`` the runs with
the worst validation accuracy end. Of those that finish, the best one is the method's run with seed 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

HERE = Path(__file__).parent
RATES = (3e-6, 1e-6, 1e-5)
SFT_RATES = (1e-5, 3e-5, 3e-6)
SEEDS = (0, 1, 2)
STEPS, SFT_STEPS, HARD_STEPS, SHORT_STEPS, FP8_STEPS = 200, 240, 100, 100, 75
RUNGS = {25: 2}  # step: how many runs of a contest go on from there
STEP_S = {"rl": 1.7, "sft": 0.3}  # GPU seconds of a step on an H200
HARD_TRAIN = "train-hard.parquet"
SETTINGS = yaml.safe_load((HERE / "settings.yaml").read_text(encoding="utf-8"))

Kind = Literal["rl", "sft"]
Sets = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """A built-in recipe, and where its start comes from."""

    label: str
    recipe: str
    kind: Kind = "rl"
    after: str | None = None  # the method whose model it starts from
    has_teacher: bool = False  # it needs the 1.5B's weights too
    sets: Sets = field(default_factory=dict)  # what it changes of the recipe


METHODS = {
    "luffy": Method("LUFFY", "small/luffy"),
    "on_policy": Method("on-policy RL", "small/on_policy"),
    "sft": Method("SFT", "small/sft", "sft"),
    "mixed": Method("Mixed-Policy", "small/mixed"),
    "sft_rl": Method("SFT, then RL", "small/on_policy", after="sft"),
    "luffy_clip": Method("LUFFY with clip", "small/luffy_clip"),
    "rl_sft_loss": Method("RL with SFT loss", "small/rl_sft_loss"),
    "sft_luffy": Method("SFT, then LUFFY", "small/luffy", after="sft"),
}
NEWER = {
    "rl_plus": "RL-PLUS", "hpt": "HPT", "exgrpo": "ExGRPO", "chord": "CHORD", "srft": "SRFT", "relift": "ReLIFT",
}  # fmt: skip
METHODS |= {name: Method(label, f"small/{name}") for name, label in NEWER.items()}
METHODS["hpt_light"] = Method("HPT, SFT coefficient 0.05", "small/hpt")
METHODS["opd"] = Method("on-policy distillation", "small/opd", has_teacher=True)
AFTER_SFT = {  # candidates for a recipe that beats SFT, then RL: each from the SFT model, at the rate of SFT, then RL
    "sft_ampo": Method("SFT, then traces where all samples fail (AMPO)", "small/ampo", after="sft"),
    "sft_trapo": Method("SFT, then prefixes by what was solved (TRAPO)", "small/trapo", after="sft"),
    "sft_ghpo": Method("SFT, then hints where all samples fail (GHPO)", "small/ghpo", after="sft"),
    "sft_exgrpo": Method("SFT, then replay (ExGRPO)", "small/exgrpo", after="sft"),
    "sft_maxrl": Method("SFT, then MaxRL", "small/maxrl", after="sft"),
    "sft_dynamic": Method(
        "SFT, then RL with dynamic sampling", "small/on_policy", after="sft",
        sets={"algorithm": {"oversample_rounds": 9}},
    ),
    # Stages: it has an SFT of its own, of which the best checkpoint goes on.
    "sft_flat": Method("SFT to its flat point, then RL", "small/sft_rl", sets={"train": {"keep_best": True}}),
}  # fmt: skip
METHODS |= AFTER_SFT
SHORT_SETS: dict[str, Sets] = {
    "chord": {"algorithm": {"mix": {"steps": SHORT_STEPS}}},  # its schedule ends with the run
    "hpt_light": {"algorithm": {"sft_coef": 0.05}},  # nearer to the released script (docs/methods.md)
}
IN_THREE_SEEDS = ("luffy", "on_policy", "sft", "mixed", "sft_rl")


VARIANTS: dict[str, tuple[str, Sets]] = {  # of LUFFY: what a table calls it, and what it changes
    **{f"entropy{c:g}": (f"entropy bonus {c:g}", {"algorithm": {"entropy_coef": c}}) for c in (0.01, 0.001)},
    "recorded": (
        "recorded log-probs of the teacher, no shaping",
        {
            "data": {"train": "train-recorded.parquet"},
            "algorithm": {"teacher_probs": "recorded", "off_policy_reshape": "no_reshape"},
        },
    ),
    **{f"traces{n}": (f"at most {n} of the traces", {"data": {"train": f"train-traces{n}.parquet"}}) for n in (1, 2)},
    **{
        f"gamma{gamma:g}": (f"gamma {gamma:g}", {"algorithm": {"off_policy_reshape": f"p_div_p_{gamma:g}"}})
        for gamma in (0.5, 0.05, 0.2)
    },
    "human": ("human solutions as traces", {"data": {"train": "train-human.jsonl"}}),
}

# The coefficients of the authors' scripts in our terms, by method (luffy/recipes/paper/*_released.yaml).
RELEASED_RATE = 1e-6  # the paper's
RELEASED: dict[str, tuple[str, Sets]] = {
    "rl_sft_loss": ("SFT coefficient 0.09", {"algorithm": {"sft_coef": 0.09}}),
    "luffy": ("entropy bonus 0.00025", {"algorithm": {"entropy_coef": 0.00025}}),
}


@dataclass(frozen=True)
class Run:
    """One training: everything that decides it, and the study's questions that it answers."""

    method: str
    lr: float
    seed: int = 0
    questions: tuple[int, ...] = (1, 3)
    note: str = ""  # what it changes, as part of its name
    sets: Sets = field(default_factory=dict)
    steps: int = STEPS
    start: str | None = None  # the run whose model it begins with

    @property
    def name(self) -> str:
        parts = [self.method, self.note, f"lr{self.lr:g}", f"s{self.seed}"]
        return "-".join(part for part in parts if part)

    @property
    def kind(self) -> Kind:
        return METHODS[self.method].kind

    def recipe(self, model: Path, data: Path, out: Path, teacher: Path | None = None) -> dict[str, Any]:
        """A recipe for ``luffy train`` (or ``luffy sft``)."""
        start = model if self.start is None else out / self.start / "model"
        own = {
            "base": METHODS[self.method].recipe,
            "name": self.name,
            "out": str(out),
            "seed": self.seed,
            "model": {"path": str(start)},
            "data": {"train": str(data / "train.parquet"), "eval": str(data / "val.jsonl")},
            "optim": {"lr": self.lr},
            "train": {"steps": self.steps},
        }
        recipe = _merged(_merged(_merged(SETTINGS, own), METHODS[self.method].sets), self.sets)
        if "train" in self.sets.get("data", {}):
            recipe["data"]["train"] = str(data / self.sets["data"]["train"])
        if METHODS[self.method].has_teacher:
            recipe["teacher"] = {"path": str(teacher)}
        return recipe


@dataclass(frozen=True)
class Contest:
    """Runs that differ in their learning rate alone. Without rungs all of them go to their last step."""

    method: str
    runs: tuple[Run, ...]
    rungs: Mapping[int, int]


Unit = Run | Contest


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    both = {**low, **high}
    for key in low.keys() & high.keys():
        if isinstance(low[key], dict) and isinstance(high[key], dict):
            both[key] = _merged(low[key], high[key])
    return both


def contest(method: str, chosen: Mapping[str, float]) -> Contest | None:
    """None where its base is not known yet."""
    if METHODS[method].kind == "sft":
        return Contest(method, tuple(Run(method, lr, steps=SFT_STEPS) for lr in SFT_RATES), {})
    start = _start(method, 0, chosen)
    if METHODS[method].after and start is None:
        return None
    return Contest(method, tuple(Run(method, lr, start=start) for lr in RATES), RUNGS)


def _start(method: str, seed: int, chosen: Mapping[str, float]) -> str | None:
    before = METHODS[method].after
    return Run(before, chosen[before], seed).name if before is not None and before in chosen else None


def plan(chosen: Mapping[str, float]) -> Iterator[Unit]:
    """All units whose learning rate is known, the most important first. ``chosen``: the rates that contests found."""
    yield from _contests(IN_THREE_SEEDS, chosen)
    yield from _seeds(chosen)
    yield from _fp8(chosen)
    yield from _hard(chosen)
    yield from _contests(("rl_sft_loss", "luffy_clip"), chosen)
    yield from _short(chosen)
    yield from _variants(chosen)
    yield from _released()
    yield from _left_open()
    yield from _after_sft(chosen)


def _contests(methods: Sequence[str], chosen: Mapping[str, float]) -> Iterator[Contest]:
    yield from filter(None, (contest(method, chosen) for method in methods))


def _seeds(chosen: Mapping[str, float]) -> Iterator[Run]:
    """Question 1: the second and third seed."""
    for seed in SEEDS[1:]:
        for method in IN_THREE_SEEDS:
            if method in chosen and (METHODS[method].after is None or _start(method, seed, chosen)):
                steps = SFT_STEPS if METHODS[method].kind == "sft" else STEPS
                yield Run(method, chosen[method], seed, start=_start(method, seed, chosen), steps=steps)


def _fp8(chosen: Mapping[str, float]) -> Iterator[Run]:
    """Question 7: rollouts in fp8, and as many steps of on-policy RL without."""
    if "on_policy" in chosen:
        fp8 = {"rollout": {"precision": "fp8"}, "algorithm": {"mismatch_correction": "truncated"}}
        for seed in SEEDS[:2]:
            for note, sets in (("fp8", fp8), ("bf16", {})):
                yield Run("on_policy", chosen["on_policy"], seed, (7,), note, sets, FP8_STEPS)


def _hard(chosen: Mapping[str, float]) -> Iterator[Run]:
    """Question 2: the problems that the base fails 8 of 8 times."""
    for seed in SEEDS:
        for method in ("on_policy", "luffy", "mixed", "sft"):
            if method in chosen:
                sets = {"data": {"train": HARD_TRAIN}}
                yield Run(method, chosen[method], seed, (2,), "hard", sets, HARD_STEPS)


def _short(chosen: Mapping[str, float]) -> Iterator[Run]:
    """Question 6: the newer methods, and three older ones, with as many steps each at LUFFY's rate; SFT, then RL at its
    own. Their models can be evaluated for question 5 too."""
    if "sft_rl" in chosen:
        yield Run("sft_rl", chosen["sft_rl"], 0, (6,), "short", {}, SHORT_STEPS, _start("sft_rl", 0, chosen))
    if "luffy" in chosen:
        for method in (*NEWER, "luffy", "on_policy", "mixed", "hpt_light", "opd"):
            yield Run(method, chosen["luffy"], 0, (6,), "short", SHORT_SETS.get(method, {}), SHORT_STEPS)


def _variants(chosen: Mapping[str, float]) -> Iterator[Run]:
    """Questions 1 (SFT, then LUFFY; more seeds of LUFFY with clip) and 4: no contests, rates of SFT, then RL and of
    LUFFY."""
    if "sft_rl" in chosen:
        yield Run("sft_luffy", chosen["sft_rl"], start=_start("sft_luffy", 0, chosen))
    if "luffy_clip" in chosen:
        for seed in SEEDS[1:]:
            yield Run("luffy_clip", chosen["luffy_clip"], seed)
    if "luffy" not in chosen:
        return
    lr = chosen["luffy"]
    for note, (_, sets) in VARIANTS.items():
        yield Run("luffy", lr, 0, (4,), note, sets, SHORT_STEPS)


def _released() -> Iterator[Run]:
    """Question 8: the coefficients of the authors' scripts."""
    for method, (_, sets) in RELEASED.items():
        yield Run(method, RELEASED_RATE, 0, (8,), "released", sets)


def _left_open() -> Iterator[Run]:
    """Question 9: LUFFY at the rate at which the others end higher, and there with an entropy bonus."""
    for seed in SEEDS:
        yield Run("luffy", RELEASED_RATE, seed, (9,), "long")
    for note in ("entropy0.01", "entropy0.001"):
        yield Run("luffy", RELEASED_RATE, 0, (9,), f"long-{note}", VARIANTS[note][1])


def _after_sft(chosen: Mapping[str, float]) -> Iterator[Run]:
    """Question 10: what beats SFT, then RL. SFT, then LUFFY is among the variants of question 4, with seed 0."""
    if "sft_rl" in chosen:
        for method in ("sft_luffy", *AFTER_SFT):
            for seed in SEEDS if method in AFTER_SFT else SEEDS[1:]:
                yield Run(method, chosen["sft_rl"], seed, (10,), start=_start(method, seed, chosen))


# Question 5 evaluates models of the others (evaluations.py) and trains none.


def runs_of(units: Iterator[Unit] | Sequence[Unit]) -> list[Run]:
    return [run for unit in units for run in (unit.runs if isinstance(unit, Contest) else (unit,))]


if __name__ == "__main__":
    known = {method: RATES[0] for method in METHODS} | {"sft": SFT_RATES[0]}
    print("Rates of runs that follow a contest are examples.")
    for run in runs_of(plan(known)):
        print(f"{run.name:32} {run.steps} steps, questions {', '.join(map(str, run.questions))}")
