"""``luffy compare``: successive halving of methods and learning rates within a budget."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from luffy.compare.arms import Arm, arms_of, restored
from luffy.compare.held_out import split_data
from luffy.compare.outcome import Outcome, markdown, outcome_of
from luffy.compare.process import Ended, luffy, run, spent_seconds, train_until
from luffy.compare.state import ArmState, State, fingerprint, read_state
from luffy.config import Config, to_yaml
from luffy.config.recipes import config_of
from luffy.errors import UserError
from luffy.evaluation.accuracy import item_accuracy
from luffy.evaluation.results import read_items
from luffy.files import write_atomically
from luffy.schema import to_dict

FINALISTS = 2
LEAST_S = 1.0  # of training in a rung
FIRST_OVERHEAD_S = 15.0  # of an arm in a rung: imports, building, evaluation; measured from then on
PATIENCE_S = 600.0
Say = Callable[[str], object]


@dataclass(frozen=True)
class Asked:
    """What the user asked for. ``budget``: seconds in all; ``patience``: seconds without a step that end an arm."""

    cfg: Config
    methods: Sequence[str]
    lrs: Sequence[float]
    seeds: int
    budget: float
    out: Path
    held_out: int | None = None
    patience: float = PATIENCE_S

    @property
    def fingerprint(self) -> str:
        values = {"cfg": to_dict(self.cfg), "methods": self.methods, "lrs": self.lrs, "seeds": self.seeds}
        return fingerprint({**values, "budget": self.budget, "held_out": self.held_out})


def rung_sizes(candidates: int) -> list[int]:
    """How many candidates train in each rung: half go on, and at least two reach the test."""
    sizes = [candidates]
    while sizes[-1] > FINALISTS:
        sizes.append(max(math.ceil(sizes[-1] / 2), FINALISTS))
    return sizes


def compare_methods(asked: Asked, say: Say) -> Outcome:
    """Train, drop and test the arms; writes compare.md and, if there is one, the winner's recipe."""
    asked.out.mkdir(parents=True, exist_ok=True)
    state = read_state(asked.out, asked.fingerprint)
    split = split_data(asked.cfg, asked.out / "data", asked.held_out)
    say("  ".join(f"{name} {size}" for name, size in split.sizes.items()))
    arms = arms_of(asked.cfg, asked.methods, asked.lrs, asked.seeds, split, asked.out / "arms")
    for arm in arms:
        state.arms.setdefault(arm.name, ArmState())
        recipe = asked.out / "recipes" / f"{arm.name}.yaml"
        recipe.parent.mkdir(exist_ok=True)
        write_atomically(recipe, to_yaml(arm.cfg))
    Halving(asked, state, arms, split.validation, split.test, say).run()
    outcome = outcome_of(arms, state.arms)
    write_atomically(asked.out / "compare.md", markdown(outcome, f"{asked.budget:g} s"))
    if outcome.winner is not None:
        best = outcome.winner.arms[0]
        winner = config_of(restored(asked.cfg, best, f"{asked.cfg.name}-{best.method.replace('_', '-')}"))
        write_atomically(asked.out / "winner.yaml", to_yaml(winner))
    return outcome


class Halving:
    """The rungs of a comparison, from where its state says that it is."""

    def __init__(self, asked: Asked, state: State, arms: Sequence[Arm], validation: Path, test: Path, say: Say) -> None:
        self.asked, self.state, self.arms, self.say = asked, state, arms, say
        self.validation, self.test = validation, test
        self.sizes = rung_sizes(len({arm.candidate for arm in arms}))
        self._before, self._began = state.spent, time.monotonic()

    def run(self) -> None:
        for rung in range(len(self.sizes)):
            self._plan(rung)
            for arm in self._left():
                if len(self._state(arm).rungs) <= rung:
                    self._climb(arm, rung)
            if rung + 1 < len(self.sizes) and not self._is_spent():
                self._drop(self.sizes[rung + 1])
            else:
                self._drop(FINALISTS)
                break
        for arm in self._left():
            if not self._state(arm).items:
                self._open_test(arm)
        self._save()

    def _is_spent(self) -> bool:
        """Whether the budget has no room for another rung: the best so far are tested at once."""
        self._save()
        overhead = fmean(self.state.overhead) if self.state.overhead else 0.0
        is_spent = self.state.spent + overhead * FINALISTS * self.asked.seeds >= self.asked.budget
        if is_spent:
            self.say("the budget is spent: the best so far are tested")
        return is_spent

    def _state(self, arm: Arm) -> ArmState:
        return self.state.arms[arm.name]

    def _left(self) -> list[Arm]:
        """The arms that are still in; all seeds of a candidate are, or none."""
        out = {arm.candidate for arm in self.arms if self._state(arm).status != "in"}
        return [arm for arm in self.arms if arm.candidate not in out]

    def _save(self) -> None:
        self.state.spent = self._before + time.monotonic() - self._began
        self.state.write(self.asked.out)

    def _plan(self, rung: int) -> None:
        """Settle to how many seconds of training the arms of a rung are taken, once."""
        if rung < len(self.state.targets):
            return
        self._save()
        runs = [size * self.asked.seeds for size in self.sizes[rung:]]
        overhead = fmean(self.state.overhead) if self.state.overhead else FIRST_OVERHEAD_S
        if not rung and self.asked.budget < FIRST_OVERHEAD_S * runs[0]:
            raise UserError(
                f"--budget of {self.asked.budget:g} s leaves {runs[0]} arms no time to train: starting and measuring "
                f"one takes about {FIRST_OVERHEAD_S:g} s; raise it, or name fewer methods, --lrs or --seeds"
            )
        left = self.asked.budget - self.state.spent - overhead * runs[-1]  # the test of the finalists
        each = left / len(runs) / max(runs[0], 1) - overhead
        before = self.state.targets[-1] if self.state.targets else 0.0
        self.state.targets.append(before + max(each, LEAST_S))
        self._save()
        self.say(
            f"rung {rung + 1} of {len(self.sizes)}: {runs[0]} arms to {self.state.targets[-1]:.0f} s of training each"
        )

    def _climb(self, arm: Arm, rung: int) -> None:
        """Train an arm to the seconds of a rung and measure it on the validation problems."""
        state, began, before = self._state(arm), time.monotonic(), self._state(arm).seconds
        target, folder = self.state.targets[rung], arm.cfg.folder
        if state.rungs and (state.finished or state.seconds >= target):
            state.rungs.append(state.rungs[-1])  # it has trained so long already, by the length of its steps
            return self._save()
        if not state.finished and spent_seconds(folder) < target:
            ended = self._train(arm, target)
            state.finished = ended.finished
            if ended.why:
                return self._fail(arm, ended.why)
        state.seconds = spent_seconds(folder)
        found = self._accuracies(arm, self.validation, f"validation-{rung + 1}")
        if isinstance(found, str):
            return self._fail(arm, found)
        state.rungs.append(fmean(found.values()))
        self.state.overhead.append(max(time.monotonic() - began - (state.seconds - before), 0.0))
        self._save()
        self.say(f"  {arm.name}: {100 * state.rungs[-1]:.1f} % of validation, {state.seconds:.0f} s")

    def _train(self, arm: Arm, target: float) -> Ended:
        command = luffy(arm.trained_by if arm.trained_by == "sft" else "train", str(self._recipe(arm)))
        return train_until(command, arm.cfg.folder, self._log(arm), target, self.asked.patience)

    def _recipe(self, arm: Arm) -> Path:
        return self.asked.out / "recipes" / f"{arm.name}.yaml"

    def _log(self, arm: Arm) -> Path:
        return self.asked.out / "recipes" / f"{arm.name}.log"

    def _accuracies(self, arm: Arm, data: Path, name: str) -> dict[str, float] | str:
        """Accuracy by problem of the arm's best checkpoint, or why it could not be measured."""
        out, e = arm.cfg.folder / "evals" / name, arm.cfg.eval
        longest = str(e.max_tokens or arm.cfg.rollout.max_tokens)
        options = ["--suite", str(data), "--out", str(out), "--reward-of", str(self._recipe(arm)), "--k", str(e.n)]
        options += ["--temperature", str(e.temperature), "--top-p", str(e.top_p), "--max-tokens", longest]
        options += ["--device", arm.cfg.model.device]
        ended = run(luffy("eval", str(arm.cfg.folder), *options), self._log(arm), self.asked.patience)
        return ended.why or item_accuracy(read_items(out))

    def _open_test(self, arm: Arm) -> None:
        found = self._accuracies(arm, self.test, "test")
        if isinstance(found, str):
            return self._fail(arm, found)
        self._state(arm).items = found
        self._save()
        self.say(f"  {arm.name}: {100 * fmean(found.values()):.1f} % of the test")

    def _fail(self, arm: Arm, why: str) -> None:
        """End an arm alone; the others go on."""
        state = self._state(arm)
        state.status, state.why, state.seconds = "failed", why, spent_seconds(arm.cfg.folder)
        self._remove_checkpoints(arm)
        self._save()
        self.say(f"  {arm.name} failed: {why}")

    def _drop(self, keep: int) -> None:
        """Keep the candidates with the highest mean validation accuracy, the last two of different methods; the
        checkpoints of the others are deleted."""
        scores: dict[str, list[float]] = {}
        method_of = {arm.candidate: arm.method for arm in self.arms}
        for arm in self._left():
            scores.setdefault(arm.candidate, []).append(self._state(arm).rungs[-1])
        order = sorted(scores, key=lambda name: (-fmean(scores[name]), name))
        if keep <= FINALISTS:
            order = best_of_each([(name, method_of[name]) for name in order])
        for arm in self.arms:
            if arm.candidate in order[keep:]:
                self._state(arm).status = "dropped"
                self._remove_checkpoints(arm)
        self._save()

    def _remove_checkpoints(self, arm: Arm) -> None:
        shutil.rmtree(arm.cfg.folder / "checkpoints", ignore_errors=True)


def best_of_each(ranked: Sequence[tuple[str, str]]) -> list[str]:
    """Candidates with their methods, the best first: the best of each method, then the others."""
    methods = [method for _, method in ranked]
    firsts = [name for i, (name, method) in enumerate(ranked) if method not in methods[:i]]
    return [*firsts, *(name for name, _ in ranked if name not in firsts)]


def seconds_in(text: str) -> float:
    """``90``, ``90s``, ``6m`` or ``2h`` in seconds."""
    number, unit = (text[:-1], text[-1]) if text and text[-1] in "smh" else (text, "s")
    try:
        value = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"--budget {text!r}: write a time such as 90s, 6m or 2h")
    return value


def rates_in(text: str | None) -> list[float]:
    """Comma-separated learning rates; none if there is no text."""
    try:
        rates = [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < math.inf for rate in rates):
        raise UserError(f"--lrs {text!r}: write learning rates such as 1e-6,3e-6")
    return list(dict.fromkeys(rates))


def as_json_text(outcome: Outcome) -> str:
    """The outcome for programs."""
    rows = [
        {"candidate": row.name, "method": row.arms[0].method, "lr": row.arms[0].lr, "seconds": row.seconds}
        | {"validation": row.validation, "test": row.test, "fate": row.fate}
        for row in outcome.rows
    ]
    behind = {name: vars(found) for name, found in outcome.behind.items()}
    winner = None if outcome.winner is None else outcome.winner.name
    return json.dumps({"rows": rows, "minus_leader": behind, "winner": winner, "words": outcome.words}, indent=1)
