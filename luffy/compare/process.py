"""One arm in a process of its own: trained to so many seconds, stopped, evaluated."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.errors import UserError
from luffy.run_folder.layout import METRICS
from luffy.run_folder.recorder import read_json_lines

POLL_S = 0.25
TO_STOP_S = 120.0  # for a checkpoint after SIGTERM
SECONDS = ("timing_s/step", "timing_s/eval", "timing_s/save")
LONGEST_REASON = 200


@dataclass(frozen=True)
class Ended:
    """How a process ended. ``why`` is empty if as it should; ``finished``: it made all its steps; ``wall``: seconds."""

    finished: bool
    wall: float
    why: str = ""


def spent_seconds(folder: Path) -> float:
    """Seconds of the steps, evaluations and checkpoints that a run has on record, of all its stages."""
    rows = read_json_lines(folder / METRICS)
    return sum(row.get(name, 0.0) for row in rows for name in SECONDS)


def train_until(command: Sequence[str], folder: Path, log: Path, seconds: float, patience_s: float) -> Ended:
    """Run a training command until the run in ``folder`` has spent ``seconds``, then ask it to stop. One that records
    nothing for ``patience_s`` is killed."""
    began = heard = time.monotonic()
    known, asked, hung = 0.0, 0.0, False
    with log.open("ab") as out:
        process = _start(command, out)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                now, size = time.monotonic(), _size(folder / METRICS)
                heard, known = (now, size) if size != known else (heard, known)
                if not asked and spent_seconds(folder) >= seconds:
                    process.send_signal(signal.SIGTERM)
                    asked = now
                hung = now - (asked or heard) > (TO_STOP_S if asked else patience_s)
                if hung:
                    process.kill()
                    process.wait()
        finally:
            _end(process)
    wall = time.monotonic() - began
    if hung:
        return Ended(False, wall, f"no step in {patience_s:g} s" if not asked else f"did not stop in {TO_STOP_S:g} s")
    if process.returncode == 0:
        return Ended(True, wall)
    stopped = bool(asked) and b"stopped at step" in _tail(log)
    return Ended(False, wall, "" if stopped else reason(process.returncode, log))


def run(command: Sequence[str], log: Path, patience_s: float) -> Ended:
    """Run a command to its end."""
    began = time.monotonic()
    with log.open("ab") as out:
        process = _start(command, out)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return Ended(False, time.monotonic() - began, f"took more than {patience_s:g} s")
        finally:
            _end(process)
    wall = time.monotonic() - began
    why = "" if process.returncode == 0 else reason(process.returncode, log)
    return Ended(not why, wall, why)


def luffy(*arguments: str) -> list[str]:
    """The command line of this installation."""
    return [sys.executable, "-m", "luffy", *arguments]


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


def _start(command: Sequence[str], out: object) -> subprocess.Popen[bytes]:
    follow: Callable[[], None] | None = _end_with_parent if sys.platform == "linux" else None
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=follow,  # type: ignore[call-overload]
        )
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}") from None


def _end_with_parent() -> None:
    """In the child: SIGTERM when the parent is gone, so that a killed comparison leaves no training behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no process behind when this one is interrupted."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(TO_STOP_S)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def _size(path: Path) -> float:
    return path.stat().st_size if path.exists() else 0.0
