"""A worker that torchrun started ends with it. (Nothing but the standard library: it runs before the slow imports.)"""

from __future__ import annotations

import os
import signal
import threading
import time

LAUNCHER_VARIABLE = "TORCHELASTIC_RUN_ID"
LOOK_EVERY_S = 0.5


def follow_launcher() -> None:
    """End this process when the launcher is gone, however it went, and at once on SIGINT. A KeyboardInterrupt would
    wait for the exchange with the other processes that is under way."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_without, args=(os.getppid(),), name="launcher", daemon=True).start()


def _end_without(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)
