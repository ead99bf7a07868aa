"""Figures over seeds against closed forms."""

import math

import pytest

from luffy.report.curves import envelope, estimate, smooth, t_quantile_95, thin_out


def test_t_quantiles_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (*range(1, 41), 60, 120, 1000):
        assert t_quantile_95(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=2e-4)


def test_no_interval_without_freedom():
    with pytest.raises(ValueError, match="degree of freedom"):
        t_quantile_95(0)


def test_estimate_is_students_interval():
    value = estimate([0.5, 0.6, 0.7])
    assert value.n == 3
    assert value.mean == pytest.approx(0.6)
    assert value.half_width == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)


def test_one_seed_has_a_mean_and_no_interval():
    assert estimate([0.25]).mean == 0.25
    assert estimate([0.25]).half_width is None
    assert estimate([]) is None


def test_envelope_stops_where_the_shortest_seed_stops():
    e = envelope([[(0, 0.0), (1, 2.0), (2, 4.0)], [(0, 1.0), (1, 0.0)]])
    assert e.steps == (0, 1)
    assert e.mean == (0.5, 1.0)
    assert e.low == (0.0, 0.0)
    assert e.high == (1.0, 2.0)


def test_envelope_interpolates_a_step_that_one_seed_skipped():
    e = envelope([[(1, 0.0), (3, 4.0)], [(1, 0.0), (2, 6.0), (3, 0.0)]])
    assert e.steps == (1, 2, 3)
    assert e.mean == (0.0, 4.0, 2.0)
    assert envelope([[(0, 0.0), (10, 5.0)], [(0, 1.0), (4, 2.0), (10, 5.0)]]).low == (0.0, 2.0, 5.0)


def test_envelope_of_seeds_without_a_common_step_is_empty():
    assert envelope([[(0, 1.0)], [(5, 1.0)]]).steps == ()
    assert envelope([]).steps == ()


def test_short_curves_are_not_touched():
    curve = [(i, float(i)) for i in range(200)]
    assert thin_out([curve]) == ([curve], 1)


def test_long_curves_become_means_over_shared_bins():
    curve = [(i, float(i)) for i in range(1200)]
    other = [(i, 1.0) for i in range(600)]
    (long, short), width = thin_out([curve, other], limit=500)
    assert width == 3
    assert len(long) == 400
    assert long[0] == (2, 1.0)  # the mean of 0, 1, 2 at the end of its bin
    assert long[-1] == (1199, 1198.0)
    assert len(short) == 200
    assert {x for x, _ in short} <= {x for x, _ in long}


def test_smoothing_goes_by_steps_and_keeps_the_first_value():
    assert smooth([(1, 4.0), (2, 0.0)], 0.5) == [(1, 4.0), (2, 0.5 * 4 / 1.5)]
    assert smooth([(1, 4.0), (3, 0.0)], 0.5) == [(1, 4.0), (3, 0.25 * 4 / 1.25)]  # two steps apart: half as heavy
    assert smooth([(0, 1.0), (1, 2.0)], 0.0) == [(0, 1.0), (1, 2.0)]
    assert smooth([], 0.9) == []
    constant = smooth([(x, 3.0) for x in range(50)], 0.97)
    assert all(abs(y - 3.0) < 1e-12 for _, y in constant)
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        smooth([], 1.0)
