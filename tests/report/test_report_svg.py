"""The charts: ticks, labels, geometry."""

import itertools
import re

import pytest

from luffy.report.curves import envelope
from luffy.report.svg import (
    FLATTEST,
    HEIGHT,
    WIDTH,
    Line,
    describe,
    hover_data,
    line_chart,
    nice_ticks,
    spread_out,
    tick_labels,
    value_ticks,
)


def line(label, *curves, style=0):
    return Line(label, style, curves, envelope(curves))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 30, [0, 10, 20, 30]),
        (-3, 7, [-4, -2, 0, 2, 4, 6, 8]),
        (0.012, 0.019, [0.012, 0.014, 0.016, 0.018, 0.02]),
    ],
)
def test_ticks_are_round_and_cover_the_span(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_ticks_of_steps_are_whole():
    assert nice_ticks(0, 2, 5, whole=True) == [0, 1, 2]


def test_tick_labels_share_their_decimals():
    assert tick_labels([0, 0.5, 1.0]) == ["0.0", "0.5", "1.0"]
    assert tick_labels([0, 10000, 20000]) == ["0", "10k", "20k"]
    assert tick_labels([-2, 0, 2]) == ["\u22122", "0", "2"]
    assert tick_labels([0, 0.0001]) == ["0.0000", "0.0001"]


def test_small_ticks_share_a_power_of_ten():
    labels = ["0.0", "0.2e\u22126", "0.4e\u22126", "0.6e\u22126", "0.8e\u22126", "1.0e\u22126"]
    assert tick_labels(nice_ticks(0, 1e-6)) == labels
    assert tick_labels(nice_ticks(-3e-9, 0)) == ["\u22123e\u22129", "\u22122e\u22129", "\u22121e\u22129", "0"]
    assert tick_labels([0, 1e-6]) == ["0.000000", "0.000001"]


@pytest.mark.parametrize("value", [1e-7, 3e-12, 1e-13, 1e-45, 1e-299, 5e-324])
@pytest.mark.parametrize("from_zero", [False, True])
def test_however_small_values_are_they_are_drawn(value, from_zero):
    drawn = line("a", [(0, value), (1, 2 * value)])
    ticks = value_ticks([drawn], from_zero)
    assert ticks[0] <= value and ticks[-1] >= 2 * value
    assert len(set(tick_labels(ticks))) == len(ticks)
    assert "nan" not in line_chart([drawn], 1, "x", from_zero)


def test_values_that_hardly_move_are_not_blown_up():
    ticks = value_ticks([line("a", [(1, 20.0), (2, 20.001)])], from_zero=False)
    assert ticks[-1] - ticks[0] >= FLATTEST * 20
    assert value_ticks([line("a", [(1, 0.0), (2, 0.0)])], from_zero=True) == [0.0, 0.5, 1.0]


def test_a_leader_never_crosses_the_chart():
    """A line that ends early has its label at the edge without one; two that end together are led to theirs."""
    short, whole = line("a", [(0, 0.0), (10, 0.5)]), line("b", [(0, 0.0), (100, 0.5)], style=1)
    for lines in ([short, whole], [line("a", [(0, 0.0), (100, 0.5)]), whole]):
        leads = re.findall(r'class="lead" d="M([\d.]+) [\d.]+L([\d.]+) ', line_chart(lines, 100, "x"))
        assert leads and all(float(end) - float(begin) < 5 for begin, end in leads)


def test_charts_side_by_side_have_the_same_width():
    plot = r'data-plot="([\d.]+) ([\d.]+) '
    one, other = line("a", [(0, 0.0), (1, 1.0)]), line("a long label", [(0, 0.0), (1, 1.0)])
    beside = ["a", "a long label"]
    ends = [re.search(plot, line_chart([drawn], 1, "x", labels_of=beside))[2] for drawn in (one, other)]
    assert ends[0] == ends[1]


def test_labels_are_moved_apart_and_stay_inside():
    places = spread_out([100, 101, 102], 10, 103, gap=13)
    assert all(b - a >= 13 for a, b in itertools.pairwise(places))
    assert places[-1] <= 103
    assert spread_out([], 0, 1) == []
    crowded = spread_out([5.0] * 40, 0, 100)
    assert min(crowded) >= -1e-9
    assert max(crowded) <= 100


def test_all_points_lie_inside_the_picture():
    lines = [line("a", [(0, -1.0), (50, 3.0)], [(0, 0.0), (50, 9.0)]), line("b", [(10, 2.0)], style=1)]
    svg = line_chart(lines, 50, "Metric")
    for path in re.findall(r' d="(M[^"]+)"', svg):
        for x, y in re.findall(r"([\d.]+) ([\d.]+)", path):
            assert 0 <= float(x) <= WIDTH
            assert 0 <= float(y) <= HEIGHT
    assert svg.count('class="band m0"') == 1  # two seeds have a range, one has none
    assert "band m1" not in svg
    assert svg.count('class="dot m1"') == 1  # a single point is drawn as a point


def test_a_method_keeps_colour_and_dash_whatever_the_chart():
    alone = line_chart([line("b", [(0, 1.0), (1, 2.0)], style=1)], 1, "x")
    together = line_chart([line("a", [(0, 1.0), (1, 2.0)]), line("b", [(0, 1.0), (1, 2.0)], style=1)], 1, "x")
    for svg in (alone, together):
        assert re.search(r'class="mean m1" d="[^"]+" stroke-dasharray="6 3"', svg)


def test_names_are_escaped_in_the_chart():
    svg = line_chart([line('<b>"&', [(0, 1.0), (1, 2.0)])], 1, "x")
    assert "<b>" not in svg
    assert "&lt;b&gt;" in svg


def test_the_description_says_where_lines_go():
    assert describe([line("a", [(0, 0.0), (4, 0.5)])], "Reward") == (
        "Reward over training steps. a goes from 0.000 at step 0 to 0.500 at step 4."
    )


def test_hover_data_has_a_range_only_over_seeds():
    one, two = hover_data([line("a", [(0, 1.0)]), line("b", [(0, 1.0)], [(0, 3.0)], style=9)])
    assert one == {"label": "a", "style": 0, "x": (0,), "y": [1.0]}
    assert (two["style"], two["y"], two["low"], two["high"]) == (1, [2.0], [1.0], [3.0])
