"""Servers of tests as processes of their own, on loopback, which end with the test."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_LIMIT_S = 60.0


def wait_until(there, process: subprocess.Popen | None = None) -> None:
    """Until ``there()`` is true; a process that ends before is an error, and so is a minute."""
    limit = time.monotonic() + START_LIMIT_S
    while not there():
        assert process is None or process.poll() is None, "the process ended"
        assert time.monotonic() < limit, "it took too long"
        time.sleep(0.01)


@contextmanager
def serving(script: Path, folder: Path, *arguments: str) -> Iterator[str]:
    """Run ``script FOLDER ...`` in a fresh interpreter; it writes its port to FOLDER/port. Gives its address."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, "-I", str(script), str(folder), *arguments], stdin=subprocess.DEVNULL)
    try:
        wait_until((folder / "port").exists, process)
        yield f"http://127.0.0.1:{(folder / 'port').read_text()}"
    finally:
        process.kill()
        process.wait()
