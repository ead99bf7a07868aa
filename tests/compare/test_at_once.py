"""How many trainings run side by side: by memory, by cores, and a number that divides the arms."""

import sys
from dataclasses import replace

import pytest

from luffy.compare import at_once as rules
from luffy.compare.arms import Arm
from luffy.compare.at_once import (
    at_once,
    environment,
    evaluations_at_once,
    evenly,
    peak_bytes,
    shared_base,
    weight_bytes,
)
from luffy.config import load_config
from luffy.dry_run.place import Place
from luffy.models.machine import pick_device
from luffy.models.shared import Base

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="shared on Linux alone")


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


@ON_LINUX
def test_shared_weights_are_counted_once(monkeypatch):
    gib = 2**30
    gpu = replace(Place.with_gpu("h200", "an H200"), free=33 * gib)
    monkeypatch.setattr(rules.Place, "of", lambda *_: gpu)
    monkeypatch.setattr(rules, "peak_bytes", lambda cfg, *_: (10 if cfg.model.four_bits else 13) * gib)
    monkeypatch.setattr(rules, "weight_bytes", lambda *_: 8 * gib)
    lora = {"model.lora": {"rank": 4, "quantize": "nf4"}, "model.path": "someone/model"}
    one = arm(**lora)
    shared = shared_base([one, one])
    assert shared == Base("someone/model", "float32", "cpu", four_bits=True)
    assert at_once([one, one])[0] == 2
    assert at_once([one, one], shared) == (10, "33.0 GiB free, 2.0 GiB a training, 8.0 GiB shared")  # of 29.7 GiB
    assert evaluations_at_once([one, one], shared) == 1  # 13 GiB each, with whole weights
    staged = Arm("sft_rl", 1e-3, 0, load_config("tiny/sft_rl", {"model.device": "cpu", **lora}))
    assert shared_base([one, staged]) == shared
    assert at_once([one, staged], shared)[0] == 2, "the second stage begins with weights of its own"
    assert shared_base([arm(**lora, **{"model.trust_remote_code": True})] * 2) is None
    rounded = replace(arm(**lora, **{"model.dtype": "bfloat16"}), method="x")
    assert at_once([one, one, rounded], shared)[0] == 2, "that one begins with weights of its own"
    full = arm()
    assert shared_base([one, full]) is None and at_once([one, one, replace(full, method="x")], shared)[0] == 1


@ON_LINUX
def test_the_weights_that_most_arms_begin_with_are_shared():
    often, once = (arm(**{"model.lora": {"rank": 4}, "model.path": path}) for path in ("x/often", "x/once"))
    for arms in ([once, often, often], [often, once, often], [often, often, once]):
        assert shared_base(arms) == Base("x/often", "float32", "cpu")


@ON_LINUX
def test_trainings_of_several_processes_share_no_weights():
    lora = {"model.lora": {"rank": 4}}
    assert shared_base([arm(**lora)] * 2) is not None
    assert shared_base([arm(**lora, launch="torchrun", **{"parallel.workers": 2})] * 2) is None


@ON_LINUX
def test_shared_weights_lie_where_trainings_ask_for_them():
    base = shared_base([arm(**{"model.lora": {"rank": 4}, "model.device": "auto"})] * 2)
    assert base is not None and base.device == pick_device("auto")


@ON_LINUX
def test_one_is_evaluated_at_a_time_where_its_memory_is_not_known():
    one = arm(**{"model.lora": {"rank": 4}, "model.path": "someone/nameless"})
    shared = shared_base([one, one])
    assert shared is not None and evaluations_at_once([one, one], shared) == 1


def test_the_weights_that_are_shared_are_those_of_the_estimate():
    place = Place.with_gpu("h200", "an H200")
    plain, quantized = (
        arm(**{"model.lora": {"quantize": kind}, "model.path": "x/Qwen2.5-7B", "model.dtype": "bfloat16"}).cfg
        for kind in (None, "nf4")
    )
    assert weight_bytes(plain, "rl", place) == pytest.approx(2 * 7.6e9, rel=0.01)
    assert (
        weight_bytes(quantized, "rl", place) < 0.4 * weight_bytes(plain, "rl", place) < peak_bytes(plain, "rl", place)
    )


def test_the_estimate_is_that_of_the_dry_run():
    gib = 2**30
    small, large = (peak_bytes(arm(**{"batch.tokens": n}).cfg, "rl", Place.of(arm().cfg)) for n in (512, 8192))
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
