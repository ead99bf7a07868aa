import torch

from luffy.metrics import EffectiveShare, Max, Mean, Min, OnDevice, Sum, fetch, merge_metrics, spread


def test_parts_of_unequal_size_merge_exactly():
    merged = merge_metrics([{"a": Mean(6.0, 3)}, {"a": Mean(10.0, 1), "b": Sum(2)}, {"b": Sum(3), "c": Max(1.0)}])
    assert {k: v.value for k, v in merged.items()} == {"a": 4.0, "b": 5.0, "c": 1.0}


def test_empty_is_zero_never_nan():
    assert [m.value for m in (Mean(0.0, 0), Mean.of([]), Max(), Min())] == [0.0] * 4
    assert {k: v.value for k, v in spread("x", []).items()} == {"x/mean": 0.0, "x/max": 0.0, "x/min": 0.0}


def test_what_was_not_measured_says_so():
    empty = [
        Mean(0.0, 0),
        Mean.of([]),
        Max(),
        Min(),
        Sum(0.0, 0),
        EffectiveShare(0.0, 0.0, 0),
        *spread("x", []).values(),
    ]
    assert [m.measured for m in empty] == [False] * len(empty)
    zero = [Mean(0.0, 3), Max(0.0), Min(0.0), Sum(0.0), EffectiveShare(0.0, 0.0, 2), *spread("x", [0.0]).values()]
    assert [m.measured for m in zero] == [True] * len(zero)
    merged = merge_metrics([{"a": Sum(0.0, 0), "b": Mean(0.0, 0)}, {"a": Sum(2.0, 3), "b": Mean(0.0, 0)}])
    assert merged["a"].measured and merged["a"].value == 2.0 and not merged["b"].measured


def test_spread():
    assert {k: v.value for k, v in spread("x", [1.0, 4.0]).items()} == {"x/mean": 2.5, "x/max": 4.0, "x/min": 1.0}


def test_fetch_rebuilds_each_kind():
    part = lambda s, n, m: {  # noqa: E731
        "mean": OnDevice(Mean, (torch.tensor(s), torch.tensor(n))),
        "max": OnDevice(Max, (torch.tensor(m),)),
    }
    merged = fetch([part(6.0, 3, 1.5), part(2.0, 1, 0.5)])
    assert merged["mean"].value == 2.0 and merged["max"].value == 1.5
    assert fetch([]) == {}
