"""What a SIGKILL at one call of a function leaves of a run: in a child that it ends, or without a kill."""

import contextlib
import os
import shutil
import signal

import pytest


@contextlib.contextmanager
def acting_at(owner, name, call, act):
    """Inside, ``act()`` comes just before that call of ``owner.name``."""
    original, calls = getattr(owner, name), 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            act()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        yield
    assert calls >= call, "the moment never came"


def killed_at(owner, name, call):
    """In a child: the call ends it."""
    return acting_at(owner, name, call, lambda: os.kill(os.getpid(), signal.SIGKILL))


def copied_at(owner, name, call, folder, to):
    """At the call the run's ``folder`` is copied ``to`` another. A kill there leaves the same files: what the process
    has not handed to the system yet is in none of them."""
    return acting_at(owner, name, call, lambda: shutil.copytree(folder, to, symlinks=True))
