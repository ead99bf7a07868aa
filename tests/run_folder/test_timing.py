"""Phases of a step add up, also where one lies inside another."""

import time
from types import SimpleNamespace

import pytest
import torch

from luffy.run_folder.timing import Stopwatch


def test_a_phase_inside_another_counts_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    said = []
    watch = Stopwatch(said.append)
    with watch("update"), watch("pack", on_host=True):
        pass
    with watch("pack"):
        pass
    assert watch.take() == {"timing_s/pack": 2.0 + 1.0, "timing_s/update": 10.0 - 2.0}
    assert said == ["update", "pack", "update", "pack"]
    assert watch.take() == {}


def test_several_phases_inside_another_and_inside_each_other(monkeypatch):
    """update 0-20 with pack 1-3, save 5-12 (in it pack 6-8), pack 15-16."""
    now = iter([0.0, 1.0, 3.0, 5.0, 6.0, 8.0, 12.0, 15.0, 16.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch()
    with watch("update"):
        with watch("pack"):
            pass
        with watch("save"), watch("pack"):
            pass
        with watch("pack"):
            pass
    assert watch.take() == {"timing_s/pack": 2.0 + 2.0 + 1.0, "timing_s/save": 5.0, "timing_s/update": 20.0 - 2 - 7 - 1}


def test_a_phase_that_fails_is_timed_and_closed(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 5.0, 7.0, 8.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch()
    with pytest.raises(ValueError, match="no"), watch("update"), watch("pack"):
        raise ValueError("no")
    with watch("sync"):
        pass
    assert watch.take() == {"timing_s/pack": 3.0, "timing_s/update": 2.0, "timing_s/sync": 1.0}


def test_on_a_gpu_a_phase_waits_for_the_work_of_its_own_thread(monkeypatch):
    """Waiting for the device is an error while another thread captures a graph."""
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the whole device"))
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    watch = Stopwatch()
    with watch("update"), watch("pack", on_host=True):
        pass
    assert waited == [1]
