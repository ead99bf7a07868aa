"""First on PYTHONPATH, this hurts one worker that torchrun starts, from inside: nobody outside could hit the moment.

LUFFY_FAULT_RANK says which worker. LUFFY_FAULT_DIES_IN is the moment at which it kills itself, once there is a
checkpoint in LUFFY_FAULT_CHECKPOINTS. LUFFY_FAULT_FILLS is the disk that it fills instead, LUFFY_FAULT_WRITE before what.
"""

import os
import sys
from pathlib import Path


def die_once():
    import signal

    folder = Path(os.environ["LUFFY_FAULT_CHECKPOINTS"])
    if any(folder.glob("step-*")) and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def hurt():
    if "LUFFY_FAULT_DIES_IN" in os.environ:
        from deadly import MOMENTS

        MOMENTS[os.environ["LUFFY_FAULT_DIES_IN"]](die_once)
    else:
        from faults_support import filling, sharded_writes

        filling(Path(os.environ["LUFFY_FAULT_FILLS"]), *sharded_writes()[os.environ["LUFFY_FAULT_WRITE"]])


def is_worker():
    return sys.orig_argv[1:3] == ["-m", "luffy"] and "TORCHELASTIC_RUN_ID" in os.environ


if is_worker() and os.environ["RANK"] == os.environ.get("LUFFY_FAULT_RANK"):
    hurt()
