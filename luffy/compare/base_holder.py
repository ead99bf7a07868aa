"""A process that holds the frozen weights that the LoRA trainings of a comparison begin with (`luffy.models.shared`).

On a CPU it ends when they are written; on a GPU it stays until the comparison ends. Evaluations load weights of their
own: those with the adapters merged.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from luffy.compare.arms import Arm
from luffy.compare.at_once import at_once, evaluations_at_once, shared_base
from luffy.compare.process import POLL_S, Job, Process, module
from luffy.models.forward import causal_lm, fused_decoder
from luffy.models.load import read_model
from luffy.models.shared import Base, MemoryFile, share

LOG = "shared-base.log"
# A GPU allocator whose memory other processes can open, whatever the user has set.
ALLOCATOR = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:False")


class BaseHolder:
    """The process, and the file in which it shares the weights."""

    def __init__(self, base: Base, log: Path, patience: float) -> None:
        self.base, self._log, self._patience = base, log, patience
        self._file: MemoryFile | None = None
        self._process: Process | None = None

    def start(self) -> bool:
        """Wait for the weights; whether they are there."""
        self.close()
        file = self._file = MemoryFile()
        command = module("luffy.compare.base_holder", json.dumps(asdict(self.base)))
        process = self._process = Process(Job(command, self._log), {**ALLOCATOR, **file.environment})
        limit = time.monotonic() + self._patience
        while not file.is_written and process.poll() is None and time.monotonic() < limit:
            time.sleep(POLL_S)
        return file.is_written

    def environment(self) -> dict[str, str]:
        """What makes trainings share the weights; a holder that was lost is started again. Empty if it cannot be."""
        if self._file is None or self._process is None:
            return {}
        lost = self.base.device != "cpu" and self._process.poll() is not None
        return {} if lost and not self.start() else self._file.environment

    def close(self) -> None:
        """End the process; the memory goes with the last training that uses it."""
        process, file, self._process, self._file = self._process, self._file, None, None
        if process is not None:
            process.terminate()
            process.end()
        if file is not None:
            file.close()


@dataclass(frozen=True)
class Room:
    """How many arms train at once, why so many, how many are evaluated at once, and who holds what they share."""

    trained: int
    why: str
    evaluated: int
    holder: BaseHolder | None = None

    def environment(self) -> dict[str, str]:
        """For trainings."""
        return {} if self.holder is None else self.holder.environment()


@contextmanager
def room_for(arms: Sequence[Arm], wanted: int | None, folder: Path, patience: float, over: bool) -> Iterator[Room]:
    """The room of a comparison; ``wanted``: trainings at once, if the user said so; ``over``: none is left."""
    base = shared_base(arms)
    most, why = (wanted, "--at-once") if wanted else at_once(arms, base)
    if base is None or most == 1 or over:
        yield Room(most, why, most)
        return
    evaluated = min(most, evaluations_at_once(arms, base))
    holder = BaseHolder(base, folder / LOG, patience)
    try:
        if holder.start():
            yield Room(most, f"{why}, sharing the frozen weights", evaluated, holder)
        else:
            most, why = (wanted, "--at-once") if wanted else at_once(arms)
            yield Room(most, f"{why}, the frozen weights cannot be shared: {folder / LOG}", most)
    finally:
        holder.close()


def hold(base: Base) -> None:
    """Load the weights and share them."""
    model = read_model(base)
    if base.device != "cpu":
        decoder = fused_decoder(causal_lm(model))
        if decoder is not None:
            decoder.merge_weights()  # as a training does where adapters allow it, which would copy them
        torch.cuda.empty_cache()
    share(model, base)
    while base.device != "cpu":
        signal.pause()


if __name__ == "__main__":
    hold(Base(**json.loads(sys.argv[1])))
