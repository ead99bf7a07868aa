"""Which problems come next: shuffled epochs that can be resumed to the exact problem."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luffy.errors import ConfigError, UserError


class ProblemSampler:
    """Indices ``0..size-1`` in a new order every epoch, without end.

    Every epoch uses every index once; a batch that reaches the end of an epoch goes on in the next. ``epoch``
    counts finished epochs.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ConfigError(f"a sampler over {size} problems has nothing to draw; check the dataset and its filters")
        self.size = size
        self.seed = seed
        self.epoch = 0
        self._position = 0
        self._order = epoch_order(size, seed, 0)

    def next(self, k: int) -> list[int]:
        """The next ``k`` indices."""
        if k < 0:
            raise ValueError(f"cannot draw {k} problems")
        drawn: list[int] = []
        while len(drawn) < k:
            stop = min(self.size, self._position + k - len(drawn))
            drawn.extend(self._order[self._position : stop].tolist())
            self._move(self.epoch, stop)
        return drawn

    def _move(self, epoch: int, position: int) -> None:
        if position == self.size:
            epoch, position = epoch + 1, 0
        if epoch != self.epoch:
            self._order = epoch_order(self.size, self.seed, epoch)
        self.epoch, self._position = epoch, position

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = {"size", "seed", "epoch", "position"} - state.keys()
        if missing:
            raise UserError(
                f"sampler state lacks {', '.join(sorted(missing))}; the checkpoint is damaged, take another"
            )
        self._check_same(state, "size", "the dataset changed; resume with the data the run began with")
        self._check_same(state, "seed", "resume with the seed the run began with")
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < self.size:
            raise UserError(
                f"sampler state has epoch {epoch} and position {position} of {self.size} problems; "
                "the checkpoint is damaged, take another"
            )
        self._move(epoch, position)

    def _check_same(self, state: Mapping[str, Any], key: str, advice: str) -> None:
        if state[key] != getattr(self, key):
            raise UserError(f"sampler state has {key} {state[key]}, this run has {getattr(self, key)}; {advice}")


def epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of ``range(size)``, a pure function of its arguments.

    Sorts indices by a 64-bit mix (the splitmix64 finaliser, one to one, so no ties). Library shuffles may change
    between versions, and a resumed run would then repeat some problems and miss others.
    """
    start = int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:8], "little")
    keys = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return np.argsort(keys).astype(np.int64, copy=False)
