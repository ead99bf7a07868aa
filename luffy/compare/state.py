"""compare.json: what a comparison has done, so that the same command resumes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from luffy.errors import UserError
from luffy.files import json_object, write_atomically

STATE = "compare.json"
Status = Literal["in", "dropped", "failed"]


@dataclass
class ArmState:
    """``rungs``: mean validation accuracy after each rung, ``at`` so many seconds of training. ``items``: accuracy by
    test problem, of a finalist. ``seconds``: of its training on record; ``finished``: it has made all its steps;
    ``why``: how it failed."""

    status: Status = "in"
    why: str = ""
    finished: bool = False
    seconds: float = 0.0
    rungs: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    items: dict[str, float] = field(default_factory=dict)

    @property
    def is_left(self) -> bool:
        """Whether it is still to be trained or tested."""
        return self.status == "in" and not self.items

    def climbed(self, accuracy: float) -> None:
        """Note a rung, reached with the seconds that are on record."""
        self.rungs.append(accuracy)
        self.at.append(self.seconds)


@dataclass
class State:
    """``asked``: fingerprint of recipe, methods, rates, seeds and budget; ``spent``: seconds since the start, of all
    attempts; ``targets``: seconds of training that each rung took an arm to, ``at_once``: so many side by side;
    ``overhead``: wall seconds of those in a rung besides."""

    asked: str
    spent: float = 0.0
    targets: list[float] = field(default_factory=list)
    at_once: list[int] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)
    arms: dict[str, ArmState] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        write_atomically(folder / STATE, json.dumps(asdict(self), indent=1) + "\n")


def read_state(folder: Path, asked: str) -> State:
    """The state of the comparison in ``folder``, a new one if there is none; a UserError if it is another."""
    path = folder / STATE
    if not path.is_file():
        return State(asked)
    remedy = "choose another --out"
    kinds = {"asked": str, "arms": dict, "targets": list, "at_once": list, "overhead": list, "spent": float}
    kept = json_object(path.read_bytes(), path, remedy, **kinds)
    if kept["asked"] != asked:
        raise UserError(f"{folder} has a comparison of another recipe, methods, rates or budget; {remedy}")
    try:
        arms = {name: ArmState(**values) for name, values in kept.pop("arms").items()}
        return State(**kept, arms=arms)
    except TypeError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None
