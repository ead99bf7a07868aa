"""The paired bootstrap where the answer is known."""

import numpy as np
import pytest

from luffy.evaluation.compare import ITEMS_TO_TELL, paired_difference, resampled_means


def test_the_interval_covers_the_true_difference_about_95_times_in_100():
    """150 pairs of normal samples whose true difference is 0.3."""
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(150):
        first = rng.normal(0.0, 1.0, 80)
        second = first + rng.normal(0.3, 0.8, 80)
        difference = paired_difference([("b", first, second)], resamples=400, seed=trial)
        covered += difference.low <= 0.3 <= difference.high
    assert 0.89 <= covered / 150 <= 0.99


def test_the_spread_is_that_of_a_mean():
    values = np.random.default_rng(1).normal(0, 2.0, 400)
    draws = resampled_means(values, 4000, np.random.default_rng(2))
    assert draws.std() == pytest.approx(values.std() / 20, rel=0.05)
    assert draws.mean() == pytest.approx(values.mean(), abs=0.01)


def test_the_blocks_of_a_large_benchmark_change_nothing(monkeypatch):
    values = np.arange(50.0)
    whole = resampled_means(values, 100, np.random.default_rng(0))
    monkeypatch.setattr("luffy.evaluation.compare._CELLS_AT_ONCE", 50 * 7)
    assert np.array_equal(resampled_means(values, 100, np.random.default_rng(0)), whole)


def test_identical_models_do_not_differ():
    values = np.random.default_rng(0).random(30)
    difference = paired_difference([("b", values, values)])
    assert (difference.value, difference.low, difference.high, difference.p) == (0.0, 0.0, 0.0, 1.0)
    assert not difference.significant


def test_no_difference_is_seldom_significant():
    rng = np.random.default_rng(3)
    found = 0
    for trial in range(150):
        first, second = rng.random(60) < 0.5, rng.random(60) < 0.5
        found += paired_difference([("b", first * 1.0, second * 1.0)], resamples=300, seed=trial).significant
    assert found / 150 < 0.11


def test_a_clearly_better_model_is_significant_and_the_sign_is_second_minus_first():
    first = np.array([0.0] * 30 + [1.0] * 30)
    second = np.array([0.0] * 10 + [1.0] * 50)
    better, worse = paired_difference([("b", first, second)]), paired_difference([("b", second, first)])
    assert better.value == pytest.approx(1 / 3) and better.p < 0.05 and better.low > 0
    assert worse.value == pytest.approx(-1 / 3) and worse.p == better.p


def test_pairing_sees_what_two_separate_samples_would_not():
    """Noise that both models share cancels."""
    shared = np.random.default_rng(4).random(100) * 10
    difference = paired_difference([("b", shared, shared + 0.1)])
    assert difference.p < 0.05 and difference.high - difference.low < 1e-9


def test_benchmarks_weigh_the_same_whatever_their_size():
    big, small = np.zeros(1000), np.zeros(10)
    difference = paired_difference([("big", big, big), ("small", small, small + 1)])
    assert difference.value == pytest.approx(0.5)


@pytest.mark.parametrize("items", range(1, 9))
def test_a_handful_of_items_is_judged_by_the_sign_test(items):
    """Every item is won, so all resamples are alike; the average is no surer than its smallest benchmark."""
    pair = ("few", np.zeros(items), np.ones(items))
    alone = paired_difference([pair])
    assert alone.p == 2 / 2**items and alone.significant == (items >= ITEMS_TO_TELL)
    assert paired_difference([pair, ("many", np.zeros(100), np.ones(100))]).p == alone.p


def test_the_seed_decides():
    rng = np.random.default_rng(5)
    first, second = rng.random(40), rng.random(40)
    one = paired_difference([("b", first, second)], seed=1)
    assert one == paired_difference([("b", first, second)], seed=1)
    assert one != paired_difference([("b", first, second)], seed=2)
