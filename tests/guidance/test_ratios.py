import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.errors import UserError
from luffy.guidance.ratios import RatioSchedule, evenly_spaced, prefix_schedule


def ratio(strategy, step, low=0.2, high=0.8, steps=100, count=1, **kw):
    return RatioSchedule(strategy, low, high, steps, **kw).ratios(count, step, "seed:problem")


def test_fixed_is_evenly_spaced_and_a_single_one_is_the_maximum():
    assert ratio("fixed", 7, count=4) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ratio("fixed", 7) == [0.8] and evenly_spaced(0.0, 1.0, 2) == [0.0, 1.0]
    assert evenly_spaced(0.05, 1.0, 4)[-1] == 1.0  # 0.05 + 0.95 is less


def test_linear_falls_from_the_maximum_to_zero_and_stays():
    assert [ratio("linear", s)[0] for s in (0, 50, 100, 300)] == pytest.approx([0.8, 0.4, 0.0, 0.0])


def test_cosine_goes_from_high_to_low():
    assert [ratio("cosine", s)[0] for s in (0, 50, 100, 300)] == pytest.approx([0.8, 0.5, 0.2, 0.2])
    assert ratio("cosine", 25)[0] == pytest.approx(0.2 + 0.3 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize(("step", "bottom"), [(0, 0.8), (25, 0.2 + 0.3 * (1 + math.sqrt(0.5))), (50, 0.5), (200, 0.2)])
def test_cosine_min_lowers_the_lower_bound(step, bottom):
    drawn = ratio("cosine_min", step, count=2000)
    assert bottom - 1e-12 <= min(drawn) < bottom + 0.02 and 0.8 - 0.02 < max(drawn) <= 0.8 + 1e-12


@pytest.mark.parametrize(("step", "chance"), [(0, 0.95), (150, 0.5), (299, 0.05)])
def test_binomial_keeps_fifths_of_the_trace_less_and_less(step, chance):
    drawn = ratio("binomial", step, low=0, high=1, steps=300, count=4000)
    assert {round(r * 5, 9) for r in drawn} <= {0, 1, 2, 3, 4, 5}
    assert sum(drawn) / len(drawn) == pytest.approx(chance, abs=0.02)
    whole = sum(r == 1 for r in drawn) / len(drawn)
    assert whole == pytest.approx(chance**5, abs=0.03)


def test_binomial_stops_and_stays_between_the_bounds():
    assert ratio("binomial", 100, count=3) == ratio("binomial", 500, count=3) == [0.2] * 3
    drawn = ratio("binomial", 50, count=500)
    assert min(drawn) == pytest.approx(0.2) and max(drawn) == pytest.approx(0.8)
    assert len(set(ratio("binomial", 50, count=9, shared=True))) == 1


@pytest.mark.parametrize(("step", "top"), [(0, 0.8), (9, 0.8), (10, 0.74), (95, 0.26), (1000, 0.26)])
def test_linear_max_has_ten_shrinking_windows(step, top):
    drawn = ratio("linear_max", step, count=2000)
    assert min(drawn) >= 0.2 and max(drawn) <= top + 1e-12
    assert max(drawn) > top - 0.02 and min(drawn) < 0.2 + 0.02


@pytest.mark.parametrize(("step", "top"), [(0, 0.26), (10, 0.32), (95, 0.8), (1000, 0.8)])
def test_reverse_linear_has_ten_growing_windows(step, top):
    drawn = ratio("reverse_linear", step, count=2000)
    assert min(drawn) >= 0.2 and top - 0.02 < max(drawn) <= top + 1e-12


@given(
    st.sampled_from(["random", "fixed", "linear", "linear_max", "reverse_linear", "cosine", "cosine_min", "binomial"]),
    st.integers(0, 400),
)
def test_pure_function_of_seed_step_and_problem(strategy, step):
    assert ratio(strategy, step, count=3) == ratio(strategy, step, count=3)
    assert all(0 <= r <= 0.8 for r in ratio(strategy, step, count=3))


def test_random_differs_by_problem_step_and_sample_unless_shared():
    schedule = RatioSchedule("random", 0.0, 1.0, 10)
    a, b = schedule.ratios(2, 1, "s:p")
    assert a != b
    assert schedule.ratios(2, 2, "s:p") != [a, b] and schedule.ratios(2, 1, "s:q") != [a, b]
    shared = RatioSchedule("random", 0.0, 1.0, 10, shared=True).ratios(3, 1, "s:p")
    assert shared == [shared[0]] * 3


def test_a_schedule_of_your_own():
    @prefix_schedule("test_steps")
    def two_levels(done, low, high):
        return high if done < 0.5 else low

    @prefix_schedule("test_wrong")
    def wrong(done, low, high):
        return 2 * high

    assert [ratio("test_steps", s, count=2) for s in (49, 50)] == [[0.8, 0.8], [0.2, 0.2]]
    with pytest.raises(UserError, match="test_wrong: gave 1.6 at step 3; a ratio is between 0 and 1"):
        ratio("test_wrong", 3)
    prefix_schedule("test_wrong_draw")(lambda done, low, high: lambda rng: 1.5)
    with pytest.raises(UserError, match="test_wrong_draw: gave 1.5 at step 3; a ratio is between 0 and 1"):
        ratio("test_wrong_draw", 3)
    with pytest.raises(UserError, match="unknown prefix schedule 'test_none'; known: fixed, random, linear"):
        ratio("test_none", 3)
