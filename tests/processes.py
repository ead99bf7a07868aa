"""Other processes of a test: whether one runs, waiting for it, servers that end with the test."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

START_LIMIT_S = 60.0


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    if Path("/proc/self").exists():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def comes_true(condition, seconds: float = 10.0) -> bool:
    """Wait for the condition; whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def wait_until(there, process: subprocess.Popen | None = None) -> None:
    """Until ``there()`` is true; a process that ends before is an error, and so is a minute."""
    limit = time.monotonic() + START_LIMIT_S
    while not there():
        assert process is None or process.poll() is None, "the process ended"
        assert time.monotonic() < limit, "it took too long"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(script: Path, folder: Path, *arguments: str) -> Iterator[str]:
    """Run ``script FOLDER``, or ``script`` with other arguments, in a fresh interpreter; it writes its port to
    FOLDER/port. Gives its address."""
    command = [sys.executable, "-Es", str(script), *(arguments or [str(folder)])]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    port = folder / "port"
    try:
        wait_until(lambda: port.exists() and port.read_text(), process)
        yield f"http://127.0.0.1:{(folder / 'port').read_text()}"
    finally:
        process.kill()
        process.wait()
