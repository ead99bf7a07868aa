"""How many trainings run side by side: by memory, by cores, and a number that divides the arms."""

from dataclasses import replace

import pytest

from luffy.compare import at_once as rules
from luffy.compare.arms import Arm
from luffy.compare.at_once import at_once, environment, evenly, peak_bytes
from luffy.config import load_config
from luffy.dry_run.place import Place, Renting


def arm(**changes):
    return Arm("luffy", 1e-3, 0, load_config("tiny/luffy", {"model.device": "cpu", **changes}))


@pytest.mark.parametrize(("cores", "threads", "most"), [(8, 1, 8), (8, 3, 2), (8, None, 1), (2, 4, 1)])
def test_by_cores(monkeypatch, cores, threads, most):
    monkeypatch.setattr(rules, "available_cores", lambda: cores)
    found, why = at_once([arm(**{"train.threads": threads})])
    assert found == most and f"{cores} cores, {threads or cores} threads a training" in why


@pytest.mark.parametrize(("free", "most"), [(5e9, 1), (33e9, 2), (34e9, 3)])
def test_by_memory(monkeypatch, free, most):
    gpu = replace(Place.with_gpu("h200", "an H200"), free=free)
    monkeypatch.setattr(rules.Place, "of", lambda *_: gpu)
    monkeypatch.setattr(rules, "peak_bytes", lambda *_: 10e9)  # of 0.9 of what is free
    assert at_once([arm()])[0] == most


def test_the_estimate_is_that_of_the_dry_run():
    gib = 2**30
    small, large = (
        peak_bytes(arm(**{"batch.tokens": n}).cfg, "rl", Place.of(arm().cfg, Renting())) for n in (512, 8192)
    )
    assert 0.3 * gib < small < large < 3 * gib


def test_the_largest_of_all_methods_and_stages_decides(monkeypatch):
    monkeypatch.setattr(rules, "available_cores", lambda: 8)
    asked = []

    def counted(cfg, method, place):
        asked.append(method)
        return place.free / (4 if method == "sft" else 10)

    monkeypatch.setattr(rules, "peak_bytes", counted)
    staged = Arm("sft_rl", 1e-3, 0, load_config("tiny/sft_rl"))
    assert at_once([arm(), staged])[0] == 3 and asked == ["rl", "sft", "rl"]


def test_what_is_not_known_trains_alone():
    assert at_once([arm(**{"rollout.engine": "vllm", "algorithm.mismatch_correction": "truncated"})])[0] == 1
    several = arm(**{"launch": "torchrun", "parallel.workers": 2})
    assert at_once([several]) == (1, "a training takes several processes")
    assert at_once([arm(**{"model.path": "someone/nameless"})])[1].startswith("the memory of a training is not known")


def test_a_number_that_divides_and_its_threads(monkeypatch):
    assert [evenly(n, 4) for n in (0, 1, 2, 3, 5, 6, 8)] == [1, 1, 2, 3, 1, 3, 4]
    monkeypatch.setattr(rules, "available_cores", lambda: 8)
    assert [environment(n) for n in (1, 3, 16)] == [{}, {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"}]
