"""``luffy compare``: successive halving of methods and learning rates within a budget."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from luffy.compare.arms import Arm, accuracies, arms_of, evaluation, training, write_recipes
from luffy.compare.at_once import environment, evenly
from luffy.compare.base_holder import Room, room_for
from luffy.compare.held_out import split_data
from luffy.compare.outcome import Outcome, outcome_of
from luffy.compare.pages import write_pages
from luffy.compare.process import Ended, spent_seconds, together
from luffy.compare.state import ArmState, State, read_state
from luffy.config import Config
from luffy.errors import UserError
from luffy.schema import to_dict

FINALISTS = 2
LEAST_S = 1.0  # of training in a rung
FIRST_OVERHEAD_S = 15.0  # of arms side by side in a rung: imports, building, evaluation; measured from then on
PATIENCE_S = 600.0
Say = Callable[[str], object]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Asked:
    """What the user asked for. ``budget``: seconds in all; ``patience``: seconds without a step that end an arm;
    ``at_once``: trainings side by side (None: as many as there is room for)."""

    cfg: Config
    methods: Sequence[str]
    lrs: Sequence[float]
    seeds: int
    budget: float
    out: Path
    held_out: int | None = None
    patience: float = PATIENCE_S
    at_once: int | None = None

    @property
    def fingerprint(self) -> str:
        values = {"cfg": to_dict(self.cfg), "methods": self.methods, "lrs": self.lrs, "seeds": self.seeds}
        values |= {"budget": self.budget, "held_out": self.held_out}
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def rung_sizes(candidates: int, seeds: int = 1, most: int = 1) -> list[int]:
    """How many candidates train in each rung: half go on, and at least two reach the test. A candidate more goes on if
    ``most`` arms side by side then fill every round."""
    sizes = [candidates]
    while sizes[-1] > FINALISTS:
        half = max(math.ceil(sizes[-1] / 2), FINALISTS)
        fuller = [size for size in range(half, sizes[-1]) if size * seeds % most == 0]
        sizes.append(fuller[0] if fuller and half > FINALISTS else half)
    return sizes


def compare_methods(asked: Asked, say: Say) -> Outcome:
    """Train, drop and test the arms; writes the pages and, if there is one, the winner's recipe."""
    asked.out.mkdir(parents=True, exist_ok=True)
    state = read_state(asked.out, asked.fingerprint)
    split = split_data(asked.cfg, asked.out / "data", asked.held_out)
    say("  ".join(f"{name} {size}" for name, size in split.sizes.items()))
    arms = arms_of(asked.cfg, asked.methods, asked.lrs, asked.seeds, split, asked.out / "arms")
    for arm in arms:
        state.arms.setdefault(arm.name, ArmState())
    write_recipes(asked.out, arms)
    began, over = time.monotonic(), not any(arm.is_left for arm in state.arms.values())
    with room_for(arms, asked.at_once, asked.out / "recipes", asked.patience, over) as room:
        state.spent += time.monotonic() - began  # the shared weights have been loaded
        Halving(asked, state, arms, split.validation, split.test, say, room).run()
    outcome = outcome_of(arms, state.arms)
    pages = write_pages(asked.cfg, outcome, state.arms, f"{asked.budget:g} s", asked.out)
    for name, path in pages.items():
        say(f"{name:<11}{path}")
    if outcome.winner is not None:
        command = "sft" if outcome.winner.arms[0].trained_by == "sft" else "train"
        say(f"to train it on all of your data: luffy {command} {pages['winner']}")
    return outcome


class Halving:
    """The rungs of a comparison, from where its state says that it is."""

    def __init__(
        self, asked: Asked, state: State, arms: Sequence[Arm], validation: Path, test: Path, say: Say, room: Room
    ) -> None:
        self.asked, self.state, self.arms, self.say = asked, state, arms, say
        self.validation, self.test = validation, test
        self.room, self.most = room, room.trained
        say(f"at most {self.most} at once ({room.why})")
        self.sizes = rung_sizes(len({arm.candidate for arm in arms}), asked.seeds, self.most)
        self._before, self._began = state.spent, time.monotonic()

    def run(self) -> None:
        for rung in range(len(self.sizes)):
            self._plan(rung)
            for arms in rounds(self._left(), self.state.at_once[rung]):
                left = [arm for arm in self._left() if arm in arms and len(self._state(arm).rungs) <= rung]
                if left:  # of a candidate whose other seed failed, none is
                    self._climb(left, rung)
            if rung + 1 < len(self.sizes) and not self._is_spent():
                self._drop(self.sizes[rung + 1])
            else:
                self._drop(FINALISTS)
                break
        for arms in rounds([arm for arm in self._left() if not self._state(arm).items], self.most):
            self._open_test(arms)
        self._save()

    def _is_spent(self) -> bool:
        """Whether the budget has no room for another rung: the best so far are tested at once."""
        self._save()
        overhead = fmean(self.state.overhead) if self.state.overhead else 0.0
        is_spent = self.state.spent + overhead * self._tests() >= self.asked.budget
        if is_spent:
            self.say("the budget is spent: the best so far are tested")
        return is_spent

    def _tests(self) -> int:
        """Rounds of the test of the finalists."""
        return math.ceil(FINALISTS * self.asked.seeds / self.most)

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
        arms = [len(self._left()), *(size * self.asked.seeds for size in self.sizes[rung + 1 :])]
        number = evenly(arms[0], self.most)
        count = [each // evenly(each, self.most) for each in arms]  # of rounds in each rung
        overhead = fmean(self.state.overhead) if self.state.overhead else FIRST_OVERHEAD_S
        if not rung and self.asked.budget < FIRST_OVERHEAD_S * count[0]:
            raise UserError(
                f"--budget of {self.asked.budget:g} s leaves {arms[0]} arms no time to train: starting and measuring "
                f"{number} takes about {FIRST_OVERHEAD_S:g} s; raise it, or name fewer methods, --lrs or --seeds"
            )
        left = self.asked.budget - self.state.spent - overhead * self._tests()
        each = left / len(arms) / max(count[0], 1) - overhead
        before = self.state.targets[-1] if self.state.targets else 0.0
        self.state.targets.append(before + max(each, LEAST_S))
        self.state.at_once.append(number)
        self._save()
        seconds = self.state.targets[-1]
        self.say(
            f"rung {rung + 1} of {len(self.sizes)}: {arms[0]} arms to {seconds:.0f} s of training, {number} at once"
        )

    def _climb(self, arms: Sequence[Arm], rung: int) -> None:
        """Train arms side by side to the seconds of a rung and measure them on the validation problems."""
        began, target = time.monotonic(), self.state.targets[rung]
        climbing, before = [], {arm.name: self._state(arm).seconds for arm in arms}
        for arm in arms:
            state = self._state(arm)
            if state.rungs and (state.finished or state.seconds >= target):
                state.climbed(state.rungs[-1])  # it has trained so long already, by the length of its steps
            else:
                climbing.append(arm)
        short = [a for a in climbing if not self._state(a).finished and spent_seconds(a.cfg.folder) < target]
        for arm, ended in zip(short, self._train(short, target), strict=True):
            self._state(arm).finished = ended.finished
            if ended.why:
                self._fail(arm, ended.why)
        trained = [arm for arm in climbing if self._state(arm).status == "in"]
        for arm, found in self._measured(trained, self.validation, f"validation-{rung + 1}"):
            state = self._state(arm)
            state.seconds = spent_seconds(arm.cfg.folder)
            state.climbed(fmean(found.values()))
            self.say(f"  {arm.name}: {100 * state.rungs[-1]:.1f} % of validation, {state.seconds:.0f} s")
        if trained:
            own = max(self._state(arm).seconds - before[arm.name] for arm in trained)
            self.state.overhead.append(max(time.monotonic() - began - own, 0.0))
        self._save()

    def _train(self, arms: Sequence[Arm], target: float) -> list[Ended]:
        """Train arms side by side until each has spent its seconds."""
        if not arms:
            return []
        jobs = [training(self.asked.out, arm, self.asked.patience, target) for arm in arms]
        return together(jobs, environment(len(jobs)) | self.room.environment())

    def _measured(self, arms: Sequence[Arm], data: Path, name: str) -> list[tuple[Arm, dict[str, float]]]:
        """Accuracy by problem of the arms' best checkpoints; an arm that cannot be measured fails."""
        found = zip(arms, self._accuracies(arms, data, name), strict=True)
        out = []
        for arm, items in found:
            if isinstance(items, str):
                self._fail(arm, items)
            else:
                out.append((arm, items))
        return out

    def _accuracies(self, arms: Sequence[Arm], data: Path, name: str) -> list[dict[str, float] | str]:
        """Accuracy by problem of each arm's best checkpoint, or why it could not be measured."""
        jobs = [evaluation(self.asked.out, arm, data, name, self.asked.patience) for arm in arms]
        parts = rounds(jobs, self.room.evaluated)
        ended = [end for part in parts for end in together(part, environment(len(part)))]
        return [end.why or accuracies(arm, name) for arm, end in zip(arms, ended, strict=True)]

    def _open_test(self, arms: Sequence[Arm]) -> None:
        for arm, found in self._measured(arms, self.test, "test"):
            self._state(arm).items = found
            self.say(f"  {arm.name}: {100 * fmean(found.values()):.1f} % of the test")
        self._save()

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


def rounds(items: Sequence[Item], number: int) -> list[Sequence[Item]]:
    """The items, so many at a time."""
    return [items[start : start + number] for start in range(0, len(items), number)]


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
