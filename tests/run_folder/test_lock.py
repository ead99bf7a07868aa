"""One training per run folder: who waits gets the lock when it is free, and not before."""

import pytest

from luffy.errors import UserError
from luffy.run_folder import lock


def test_who_has_patience_waits_until_the_lock_is_free(tmp_path, monkeypatch):
    held = lock.lock_folder(tmp_path)
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            held.file.close()  # as the process that held it ends

    monkeypatch.setattr(lock.time, "sleep", nap)
    lock.lock_folder(tmp_path, patience_s=3600.0).release()
    assert len(naps) == 3


def test_patience_ends(tmp_path, monkeypatch):
    """The clock goes on by 10 seconds a nap."""
    clock, naps = [1000.0], []
    monkeypatch.setattr(lock.time, "monotonic", lambda: clock[0])

    def nap(seconds):
        naps.append(seconds)
        clock[0] += 10.0

    monkeypatch.setattr(lock.time, "sleep", nap)
    held = lock.lock_folder(tmp_path)
    with pytest.raises(UserError, match=r"another training is running in .*; wait for it or choose another name="):
        lock.lock_folder(tmp_path, patience_s=35.0)
    assert len(naps) == 4
    with pytest.raises(UserError, match="another training is running"):
        lock.lock_folder(tmp_path)
    assert len(naps) == 4
    held.release()
