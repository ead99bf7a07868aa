"""A timer that ends the process with SIGKILL: set by the process itself, fired by the kernel, caught by nobody.

A killer outside would have to guess how far the training is; on a busy machine it would miss the short phases.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),  # 0 is SIGEV_SIGNAL
        ("padding", ctypes.c_byte * 48),
    )


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


def kill_this_process_after(seconds: float, clock: int = time.CLOCK_MONOTONIC) -> None:
    """``clock`` may be CLOCK_PROCESS_CPUTIME_ID: seconds of work, however busy the machine is."""
    libc = ctypes.CDLL(None, use_errno=True)
    event, timer = _SigEvent(signo=signal.SIGKILL), ctypes.c_void_p()
    nanoseconds = max(int(seconds * 1e9), 1)
    spec = _TimerSpec(seconds=nanoseconds // 10**9, nanoseconds=nanoseconds % 10**9)
    for status in (
        libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)),
        libc.timer_settime(timer, 0, ctypes.byref(spec), None),
    ):
        if status != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
