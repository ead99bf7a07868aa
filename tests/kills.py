"""What a SIGKILL would leave of a run, without the process that it takes."""

import contextlib
import shutil

import pytest


@contextlib.contextmanager
def copied_at(owner, name, call, folder, to):
    """Inside, at that call of ``owner.name`` the run's ``folder`` is copied ``to`` another. A kill there leaves the same
    files: what the process has not handed to the system yet is in none of them."""
    original, calls = getattr(owner, name), 0

    def copying(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            shutil.copytree(folder, to, symlinks=True)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, copying)
        yield
    assert calls >= call, "the moment never came"
