"""A report of more methods than colours tell apart."""

import re
from itertools import pairwise

import pytest

from luffy.report.html import write_report
from luffy.report.methods import FAMILIES, GATED, MIXED, OWN_SAMPLES, TAUGHT, TRACES, family_of
from luffy.report.svg import DotRow, dot_plot


@pytest.fixture
def many(write_run, make_metric_row, make_sample_row):
    """Nine methods of two seeds; method i ends at i tenths, give or take one hundredth."""
    for i in range(9):
        config = {"guidance": {"n_prefix": i % 2}, "optim": {"lr": 1e-4 if i == 3 else 1e-5}}
        for seed, change in ((0, 0.01), (1, -0.01)):
            rows = [make_metric_row(0, 0.0), make_metric_row(2, i / 10 + change * (i > 0))]
            folder = write_run(f"method-{i}x/seed-{seed}", rows, config, [make_sample_row(1)])
    return folder.parents[1]


def test_the_best_method_comes_first_in_a_short_table(many, read_page):
    rows = read_page(write_report([many])).tables["final"]
    assert rows[0][3:] == ["Held-out accuracy", "Reward", "Entropy", "Length", "Seconds"]  # no start, no best
    assert [row[0] for row in rows[2:]] == [f"method-{i}x" for i in range(8, -1, -1)]
    assert rows[2][1:4] == ["2", "2", "0.800 0.790 to 0.810"]


def test_every_method_has_a_row_of_dots_and_a_label_that_no_other_covers(many):
    page = write_report([many]).read_text(encoding="utf-8")
    plot = re.search(r'<figure class="dots">.*?</figure>', page, re.DOTALL)[0]
    places = [float(y) for y in re.findall(r'<text class="label end" x="[\d.]+" y="([\d.]+)"', plot)]
    assert len(places) == 9 and all(b - a >= 13 for a, b in pairwise(places))


def test_curves_are_drawn_by_family_with_the_others_behind(many, read_page):
    path = write_report([many])
    page = read_page(path)
    charts = [
        tag["aria-label"] for name, tag in page.tags if name == "svg" and "Accuracy" in (tag.get("aria-label") or "")
    ]
    assert [text.partition(":")[0] for text in charts] == [OWN_SAMPLES, TRACES] * 2  # over steps and GPU seconds
    assert [text.count("goes from") for text in charts] == [5, 4] * 2
    assert path.read_text(encoding="utf-8").count('<path class="behind"') == 18
    assert "all other curves" in page.text


def test_what_sets_a_method_apart_is_in_its_own_row(many, read_page):
    page = read_page(write_report([many]))
    assert page.row("unusual", "method-3x")[1] == "guidance.n_prefix=1 optim.lr=0.0001"
    assert page.row("unusual", "method-4x")[1] == "nothing"


def test_every_method_shows_a_group_of_samples(many, read_page):
    groups = [tag["data-label"] for name, tag in read_page(write_report([many])).tags if name == "article"]
    assert set(groups) == {f"method-{i}x" for i in range(9)}


def test_eight_methods_share_their_charts(many, read_page):
    page = read_page(write_report([many / f"method-{i}x" for i in range(8)]))
    assert "unusual" not in page.tables and "all other curves" not in page.text


def test_dots_lie_on_the_axis_and_intervals_are_cut_off_at_its_ends():
    plot = dot_plot([DotRow("a", 0, [0.9, 1.0]), DotRow("b", 1, [0.0] * 5)], "accuracy")
    axis = [float(x) for x in re.findall(r'<path class="grid" d="M([\d.]+) 6\.0V', plot)]
    low, high = min(axis), max(axis)
    dots = [float(x) for x in re.findall(r'<circle class="dot m\d" cx="([\d.]+)"', plot)]
    assert dots == pytest.approx([low + share * (high - low) for share in (0.9, 1.0, 0.95, *(0.0,) * 6)], abs=0.06)
    ((begin, end),) = re.findall(r'<path class="mean m0" d="M([\d.]+) [\d.]+H([\d.]+)"', plot)
    assert float(begin) == pytest.approx(low + (0.95 - 0.6353) * (high - low), abs=0.1)  # 12.706 * 0.0707 / sqrt(2)
    assert float(end) == high
    few = dot_plot([DotRow("a", 0, [0.9, 1.0]), DotRow("b", 1, [0.0])], "accuracy")  # of few seeds: their range
    ((begin, end),) = re.findall(r'<path class="mean m0" d="M([\d.]+) [\d.]+H([\d.]+)"', few)
    assert float(begin) == pytest.approx(low + 0.9 * (high - low), abs=0.1) and float(end) == high


def test_families_of_settings():
    assert family_of({}) == OWN_SAMPLES
    assert family_of({"guidance.n_prefix": 1, "guidance.gate": "none", "algorithm.trace_term": "rl"}) == TRACES
    assert family_of({"guidance.n_prefix": 0, "guidance.gate": "trace_on_failure"}) == GATED
    assert family_of({"command": "sft", "guidance.n_prefix": 1}) == MIXED
    assert family_of({"algorithm.trace_term": "sft", "guidance.n_prefix": 1}) == MIXED
    assert family_of({"batch.expert_share": 0.2}) == family_of({"sft_steps.buffer": 128}) == MIXED
    assert family_of({"algorithm.credit": "srft", "guidance.n_prefix": 1}) == MIXED
    assert family_of({"teacher.path": "self"}) == family_of({"teacher.servers": ["http://a"]}) == TAUGHT
    assert family_of({"rollout.offpolicy_guidance.model_path": "m"}) == TAUGHT
    assert family_of({"rollout.offpolicy_guidance.servers": ["http://a"]}) == TAUGHT
    assert len(set(FAMILIES)) == 5
