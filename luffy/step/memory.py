"""Algorithm state carried between steps besides weights and optimizer:

    replay      solved responses of the policy's own (`replay`, or a gate that recalls them)
    experts     how far the sampler of the expert batch has come (`batch.expert_share`)
    lessons     traces of problems that the policy failed, until there are enough for an SFT step (`sft_steps`)
    in_flight   problems whose responses are not all finished (`rollout.max_tokens_per_step`)

It is the same on every rank, and in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.seeds import seed_of
from luffy.step.in_flight import InFlight, problems_of, state_of
from luffy.step.replay import Attempt, Replay


class MethodMemory:
    """``problems``: how many there are in the training data. Parts that the config does not use are None or empty."""

    def __init__(self, cfg: Config, problems: int) -> None:
        recalls = cfg.guidance.gate.part.recalls
        self.replay = Replay(cfg.replay, cfg.rollout.n) if cfg.replay.share or recalls else None
        self.experts = ProblemSampler(problems, seed_of(f"{cfg.seed}:experts")) if cfg.batch.expert_share else None
        self.lessons: list[tuple[int, int]] = []  # row of the problem, number of its trace
        self.in_flight: list[InFlight] = []  # the oldest first
        self._buffer = cfg.sft_steps.buffer
        self._position = (0, 0)  # of the experts' sampler where the next step begins: epoch and place in it

    @property
    def is_used(self) -> bool:
        return self.replay is not None or self.experts is not None or self._buffer > 0

    def remember(self, attempts: Sequence[Attempt]) -> None:
        """Take in what a step found, of all ranks and in the order of the step. Nothing else changes what is saved."""
        if self.replay is not None:
            self.replay.remember(attempts)
        if self.experts is not None:
            now = self.experts.state_dict()
            self._position = now["epoch"], now["position"]
        self.lessons += [(a.row, a.lesson) for a in attempts if a.lesson is not None]

    def take_lessons(self) -> list[list[tuple[int, int]]]:
        """Remove and return row and trace of every SFT step that is due; fewer than a step takes stay."""
        due = len(self.lessons) // self._buffer if self._buffer else 0
        steps = [self.lessons[i * self._buffer : (i + 1) * self._buffer] for i in range(due)]
        self.lessons = self.lessons[due * self._buffer :]
        return steps

    def rewind(self) -> None:
        """Undo the draws of the current step: it will not be finished."""
        if self.experts is not None:
            epoch, position = self._position
            self.experts.load_state_dict({**self.experts.state_dict(), "epoch": epoch, "position": position})

    def forget_traces(self) -> tuple[int, int]:
        """Drop what refers to a trace by its number; returns how many unfinished problems and how many SFT traces."""
        kept = [problem for problem in self.in_flight if not problem.uses_trace]
        dropped = len(self.in_flight) - len(kept), len(self.lessons)
        self.in_flight, self.lessons = kept, []
        return dropped

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name, none without elements."""
        state = {} if self.replay is None else {f"replay/{k}": v for k, v in self.replay.state_dict().items()}
        if self.experts is not None:
            state["experts"] = torch.tensor(self._position)
        if self.lessons:
            state["lessons"] = torch.tensor(self.lessons)
        return state | {f"under_way/{k}": v for k, v in state_of(self.in_flight).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """``state`` of a checkpoint; what it lacks stays as it is at the start of a run."""
        if self.replay is not None:
            self.replay.load_state_dict(under_prefix(state, "replay/"))
        if self.experts is not None and "experts" in state:
            epoch, position = state["experts"].tolist()
            self._position = epoch, position
            self.rewind()
        if self._buffer and "lessons" in state:
            self.lessons = [(row, trace) for row, trace in state["lessons"].tolist()]
        self.in_flight = problems_of(under_prefix(state, "under_way/"))

    def unused(self, state: Mapping[str, Tensor]) -> dict[str, str]:
        """Parts of ``state`` that the config does not use, in words, with the setting that turns each off."""
        known = [state[key] for key in ("replay/problems", "replay/retired") if key in state]
        found = {}
        if known and self.replay is None:
            found[f"{sum(map(len, known))} problems in the replay"] = "replay.share"
        if "lessons" in state and not self._buffer:
            found[f"{len(state['lessons'])} traces that waited for an SFT step"] = "sft_steps.buffer"
        return found


def under_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
