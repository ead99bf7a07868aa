"""``launch: local | torchrun | ray``: one command, however many processes it takes."""

from __future__ import annotations

import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

from luffy.config import Config
from luffy.distributed.world import is_launched
from luffy.errors import ConfigError, TrainingStopped
from luffy.plugins import python_flags

OnStep = Callable[[int, dict[str, float]], None]
GO_ON = "rerun the same command to resume from the last complete checkpoint"


class Launchable(Protocol):
    """A training that can run alone or as one of several processes."""

    @property
    def cfg(self) -> Config: ...

    def alone(self) -> None: ...

    def as_worker(self, on_step: OnStep = ..., out: TextIO | None = None) -> None: ...

    def again(self) -> Launchable: ...


def launch(job: Launchable, arguments: Sequence[str], after_loss: str = GO_ON) -> None:
    """Run the job as its config says. ``arguments`` of this command line start it again in every worker;
    ``after_loss``: what to do when a process was killed."""
    how = job.cfg.launch
    if is_launched():
        if how != "torchrun":
            raise ConfigError(f"torchrun started this process, but launch={how}; add launch=torchrun")
        job.as_worker()
    elif how == "local":
        job.alone()
    elif how == "torchrun":
        start_processes(job.cfg.parallel.workers, arguments, after_loss)
    else:
        from luffy.distributed.ray_launch import run_on_ray

        run_on_ray(job)


def start_processes(workers: int, arguments: Sequence[str], after_loss: str = GO_ON) -> None:
    """``workers`` processes of this machine, as torchrun would start them; ends with the code of the first to fail.
    One that was killed could say nothing itself."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    command: Any = elastic_launch(config, sys.executable)
    try:
        command(*python_flags(), "-m", "luffy", *arguments)
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        name = signal.Signals(error.sigval).name
        raise TrainingStopped(f"ended by {name}, and its {workers} processes with it; {after_loss}") from None
    except ChildFailedError as error:
        # Whom the launcher ended with SIGTERM is in the list too: after who was killed, and after who failed.
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        rank = min(codes, key=lambda rank: (codes[rank] == -signal.SIGTERM, codes[rank]))
        if codes[rank] < 0:
            raise TrainingStopped(killed_message(rank, workers, -codes[rank], after_loss)) from None
        sys.exit(codes[rank])


def killed_message(rank: int, workers: int, number: int, after_loss: str) -> str:
    name = signal.Signals(number).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"process {rank} of {workers} was ended by {name}{hint}, and the others with it; {after_loss}"
