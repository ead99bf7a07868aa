"""Commands in processes of their own, side by side: watched, stopped, killed if they hang, named if they fail."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.errors import UserError
from luffy.metrics import training_seconds
from luffy.plugins import python_flags
from luffy.run_folder.layout import METRICS
from luffy.run_folder.recorder import read_json_lines

POLL_S = 0.25
TO_STOP_S = 120.0  # for a checkpoint after SIGTERM
LONGEST_REASON = 200


@dataclass(frozen=True)
class Ended:
    """How a process ended. ``why`` is empty if as it should; ``finished``: it ran to its end."""

    finished: bool
    why: str = ""
    code: int = 0


def spent_seconds(folder: Path) -> float:
    """Seconds of the steps, evaluations and checkpoints that a run has on record, of all its stages."""
    return sum(map(training_seconds, read_json_lines(folder / METRICS)))


@dataclass(frozen=True)
class Job:
    """A command, and the file that gets what it says. A training's ``folder`` is watched: it is asked to stop when the
    run has spent ``seconds``, and killed if nothing is recorded for ``patience_s``; another command is killed if it
    takes as long."""

    command: Sequence[str]
    log: Path
    patience_s: float = math.inf
    folder: Path | None = None
    seconds: float = math.inf


class Process:
    """A job that runs. ``poll`` looks after it, and must be called again and again until it tells how the job ended."""

    def __init__(self, job: Job, environment: Mapping[str, str] | None = None) -> None:
        self.job, self._heard, self._size, self._asked = job, time.monotonic(), -1.0, 0.0
        with job.log.open("ab") as out:
            self._process = _start(job.command, out, environment or {})

    def poll(self) -> Ended | None:
        """How the job ended; None while it runs."""
        code = self._process.poll()
        if code is not None:
            stopped = self._asked and b"stopped at step" in _tail(self.job.log)
            return Ended(code == 0, "" if code == 0 or stopped else reason(code, self.job.log), code)
        now, folder = time.monotonic(), self.job.folder
        if folder is not None and (size := _size(folder / METRICS)) != self._size:
            self._heard, self._size = now, size
            if not self._asked and self.job.seconds < math.inf and spent_seconds(folder) >= self.job.seconds:
                self.ask_to_stop()
        patience = TO_STOP_S if self._asked else self.job.patience_s
        if now - (self._asked or self._heard) <= patience:
            return None
        self._process.kill()
        self._process.wait()
        said = "did not stop in" if self._asked else "took more than" if folder is None else "no step in"
        return Ended(False, f"{said} {patience:g} s", self._process.returncode)

    def ask_to_stop(self) -> None:
        """A training then ends after its step, with a checkpoint."""
        self._asked = time.monotonic()
        self._process.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """A training then ends at once, without a checkpoint, and lets go of the GPU in order."""
        self._process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Leave no process behind that was terminated."""
        try:
            self._process.wait(TO_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def together(jobs: Sequence[Job], environment: Mapping[str, str] | None = None) -> list[Ended]:
    """Run all jobs side by side, until the last one has ended."""
    running: list[Process] = []
    ended: dict[int, Ended] = {}
    try:
        running += [Process(job, environment) for job in jobs]
        while len(ended) < len(running):
            time.sleep(POLL_S)
            for i, process in enumerate(running):
                if i not in ended and (how := process.poll()) is not None:
                    ended[i] = how
    finally:
        for process in running:  # all are asked before one is waited for
            process.terminate()
        for process in running:
            process.end()
    return [ended[i] for i in range(len(running))]


def luffy(*arguments: str) -> list[str]:
    """The command line of this installation."""
    return module("luffy", *arguments)


def module(name: str, *arguments: str) -> list[str]:
    """The command of a module."""
    return [sys.executable, *python_flags(), "-m", name, *arguments]


def reason(code: int, log: Path) -> str:
    """Why a process failed: the last line that it said, or what ended it."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = _tail(log).decode("utf-8", "replace").strip().splitlines()
    said = lines[-1] if lines else f"exit code {code}"
    return said.removeprefix("luffy: ").removeprefix("error: ")[:LONGEST_REASON]


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 4096, 0))
        return file.read()


def _start(command: Sequence[str], out: object, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    follow: Callable[[], None] | None = _end_with_parent if sys.platform == "linux" else None
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is for this process, which then stops its children
            preexec_fn=follow,  # type: ignore[call-overload]
        )
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}") from None


def _end_with_parent() -> None:
    """In the child: SIGTERM when the parent is gone, so that a killed comparison leaves no training behind. SIGINT as a
    shell's foreground job has it: one in the background ignores it, as would its children."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _size(path: Path) -> float:
    return path.stat().st_size if path.exists() else 0.0
