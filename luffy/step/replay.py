"""Replay: solved responses of the policy's own that later steps learn from again (ExGRPO).

Nothing is remembered until the replay has begun. From then on a problem enters with those of its responses that solved
it, unless all or none did; one that is solved by all of them retires for good. A step draws problems by how many of
their samples solved them last time: most of all those that half of them did.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from luffy.config.knobs import ReplayConfig
from luffy.types import Demonstration


@dataclass(frozen=True, eq=False)
class Success:
    """A response of the policy's own that solved its problem: the log-probs it was drawn with, the step of that, and
    which tokens an environment wrote (None: none of them)."""

    token_ids: Tensor  # [T] int32
    log_probs: Tensor  # [T] float32
    step: int
    replies: Tensor | None = None  # [T] bool

    @property
    def as_trace(self) -> Demonstration:
        """The response as a trace, to be replayed as one."""
        spans = () if self.replies is None else tuple(_spans(self.replies))
        return Demonstration(tuple(self.token_ids.tolist()), tuple(self.log_probs.tolist()), spans)


@dataclass(frozen=True)
class Attempt:
    """What the policy made of one problem in a step: ``fresh`` responses, those that solved it, and whether an earlier
    one was replayed beside them, which had solved it."""

    row: int
    fresh: int
    successes: tuple[Success, ...] = ()
    replayed: bool = False
    lesson: int | None = None  # number of the trace to learn from, where every fresh response failed

    @property
    def samples(self) -> int:
        return self.fresh + self.replayed

    @property
    def solved(self) -> int:
        return len(self.successes) + self.replayed


@dataclass
class Remembered:
    """A problem in the replay: how many of its samples solved it last time, and its responses, the oldest first."""

    solved: int
    successes: list[Success] = field(default_factory=list)


class Replay:
    """Problems by their row in the data; the one whose last success is longest ago comes first."""

    def __init__(self, cfg: ReplayConfig, n: int) -> None:
        self.cfg, self.n = cfg, n
        self.begun = False
        self.retired: set[int] = set()
        self.problems: dict[int, Remembered] = {}

    def __len__(self) -> int:
        return len(self.problems)

    def draw(self, count: int, key: str) -> list[int]:
        """Rows of ``count`` different problems, or of all there are. ``key`` is the seed: one of the bucket, in which
        problems have equally many solved samples k, by the weight N(k; n/2, 1), then one of the problem in it."""
        buckets: dict[int, list[int]] = {}
        for row, remembered in sorted(self.problems.items()):
            buckets.setdefault(remembered.solved, []).append(row)
        chance = random.Random(f"replay:{key}")
        drawn: list[int] = []
        while buckets and len(drawn) < count:
            solved = sorted(buckets)
            weights = [bucket_weight(k, self.n) for k in solved]
            (k,) = chance.choices(solved, weights if any(weights) else None)  # far from n/2 all round to 0
            drawn.append(buckets[k].pop(chance.randrange(len(buckets[k]))))
            if not buckets[k]:
                del buckets[k]
        return drawn

    def remember(self, attempts: Iterable[Attempt]) -> None:
        """Take in what a step found, of all ranks and in the order of the step. The replay begins when more than
        ``replay.start`` of the fresh samples of a step are right; that step itself is not remembered."""
        attempts = list(attempts)
        fresh = sum(a.fresh for a in attempts)
        if not self.begun:
            self.begun = fresh > 0 and sum(len(a.successes) for a in attempts) > self.cfg.start * fresh
            return
        for attempt in attempts:
            self._take_in(attempt)
        while len(self.problems) > self.cfg.problems:
            del self.problems[next(iter(self.problems))]

    def _take_in(self, attempt: Attempt) -> None:
        if attempt.solved == 0 or attempt.row in self.retired:
            return
        known = self.problems.pop(attempt.row, Remembered(0)).successes
        if attempt.solved == attempt.samples:
            self.retired.add(attempt.row)
            return
        for success in attempt.successes:
            if not any(torch.equal(success.token_ids, other.token_ids) for other in known):
                known.append(success)
        self.problems[attempt.row] = Remembered(attempt.solved, known[-self.cfg.responses :])

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that ``load_state_dict`` takes; one without elements is left out."""
        every = [(row, s) for row, remembered in self.problems.items() for s in remembered.successes]
        state = {
            "begun": torch.tensor([int(self.begun)]),
            "retired": torch.tensor(sorted(self.retired), dtype=torch.long),
            "problems": torch.tensor([(row, r.solved) for row, r in self.problems.items()], dtype=torch.long),
            "responses": torch.tensor([(row, s.step, s.token_ids.numel()) for row, s in every], dtype=torch.long),
            "token_ids": torch.cat([torch.empty(0, dtype=torch.int32), *(s.token_ids for _, s in every)]),
            "log_probs": torch.cat([torch.empty(0), *(s.log_probs for _, s in every)]),
            "replies": torch.cat([torch.empty(0, dtype=torch.bool), *map(_replies_of, (s for _, s in every))]),
        }
        if not state["replies"].any():
            del state["replies"]
        return {name: tensor for name, tensor in state.items() if tensor.numel()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not state:
            return
        self.begun = bool(state["begun"].item())
        self.retired = set(_rows(state, "retired"))
        self.problems = {row: Remembered(solved) for row, solved in _rows(state, "problems")}
        responses = _rows(state, "responses")
        if responses:
            lengths = [length for _, _, length in responses]
            nowhere = torch.zeros(sum(lengths), dtype=torch.bool)
            streams = (state[name].split(lengths) for name in ("token_ids", "log_probs"))
            masks = state.get("replies", nowhere).split(lengths)
            for (row, step, _), ids, log_probs, mask in zip(responses, *streams, masks, strict=True):
                replies = mask.clone() if mask.any() else None
                self.problems[row].successes.append(Success(ids.clone(), log_probs.clone(), step, replies))
        self.problems = {row: remembered for row, remembered in self.problems.items() if remembered.successes}


def _replies_of(success: Success) -> Tensor:
    return torch.zeros_like(success.token_ids, dtype=torch.bool) if success.replies is None else success.replies


def _spans(mask: Tensor) -> Iterator[tuple[int, int]]:
    """Start and end of each stretch of a mask."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int()).nonzero().flatten()
    yield from ((int(start), int(end)) for start, end in edges.view(-1, 2))


def _rows(state: Mapping[str, Tensor], name: str) -> list[Any]:
    return state[name].tolist() if name in state else []


def bucket_weight(solved: int, n: int) -> float:
    """N(k; n/2, 1) without its constant."""
    return math.exp(-0.5 * (solved - n / 2) ** 2)


def least_entropy(successes: Sequence[Success], entropies: Sequence[Tensor]) -> Success:
    """The response whose mean entropy under the policy is least; of equals the oldest."""
    return min(zip(successes, entropies, strict=True), key=lambda pair: float(pair[1].mean()))[0]
