"""Figures and tables of the study."""

import statistics
import sys
from pathlib import Path

import pytest
from builders import write_rows

pytest.importorskip("matplotlib")

FOLDER = Path(__file__).parents[2] / "studies" / "gsm8k"
sys.path.insert(0, str(FOLDER))

import figures  # noqa: E402


def test_the_tables_of_the_pages_are_those_of_the_results():
    text = "".join(page.read_text(encoding="utf-8") for page in figures.PAGES)
    rows = figures.read(FOLDER / "results")
    assert figures.fill(text, rows) == text
    assert all(text.count(f"<!-- {name} -->") == 1 for name in figures.TABLES)


def ratios_of_entropy(rows, task):
    """LUFFY's entropy over Mixed-Policy's, run by run: the median over the steps from 6 on that both have."""
    pairs = zip(*(figures.pick(rows, question="main", task=task, method=m) for m in ("luffy", "mixed")), strict=False)
    for runs in pairs:
        luffy, mixed = (dict(map(tuple, run["curves"]["actor/entropy_loss"])) for run in runs)
        yield statistics.median(luffy[step] / mixed[step] for step in luffy.keys() & mixed.keys() if step >= 6)


def interval_of_difference(rows, one, other):
    """Student's interval of the difference in held-out stories seed for seed, in points."""
    one, other = (
        {run["seed"]: 100 * figures.held_out(run) for run in figures.pick(rows, method=method)}
        for method in (one, other)
    )
    found = [one[seed] - other[seed] for seed in one]
    middle, half = statistics.mean(found), figures.half_width(found)
    return middle - half, middle + half


def test_figures_in_the_prose_of_the_document():
    rows = figures.read(FOLDER / "results")
    assert len(rows) == 143
    for metric, most in (("val-math/accuracy", 0.04), ("val-arc/accuracy", 0.10)):
        for method in figures.MAIN:
            runs = figures.pick(rows, question="main", task="gsm8k", method=method)
            asked = [figures.last(run, metric) for run in runs if metric in run["curves"]]
            assert 0 <= sum(asked) / len(asked) < most
    assert list(ratios_of_entropy(rows, "stories")) == pytest.approx([1.96, 1.95, 3.26], abs=0.006)
    assert list(ratios_of_entropy(rows, "gsm8k")) == pytest.approx([3.7, 4.7], abs=0.05)
    stories = figures.ablation_rows(rows, "stories")
    assert interval_of_difference(stories, "mixed_shaping", "luffy") == pytest.approx((2.8, 10.5), abs=0.05)
    assert interval_of_difference(stories, "mixed_shaping", "mixed") == pytest.approx((-11, 25), abs=0.5)
    (pilot,) = figures.pick(rows, question="pilot", method="luffy")
    assert [pilot["curves"]["actor/entropy_loss"][i][1] for i in (0, -1)] == pytest.approx([1.8, 7.0], abs=0.05)


def test_intervals():
    assert figures.share([0.5, 0.6, 0.7], 100) == "60.0 (35.2 to 84.8)"  # 4.303 * 0.1 / sqrt(3)
    low, high = figures.wilson(0.5, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert figures.wilson(0.0, 512)[1] == pytest.approx(0.00745, abs=1e-4)


def test_a_run_in_two_files_counts_once_and_an_unfinished_one_not_at_all(tmp_path):
    for name, finished in (("a", True), ("b", False)):
        rows = [{"name": "x", "finished": finished, "file": name}, {"name": "y", "finished": False}]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    assert figures.read(tmp_path) == [{"name": "x", "finished": True, "file": "a"}]


def test_two_seeds_on_the_same_problems_are_not_twice_as_many_problems():
    assert figures.share([0.5, 0.5], 256) == figures.share([0.5], 256) == "50.0 (43.9 to 56.1)"
    assert figures.share([0.4, 0.5, 0.6], 256) == "50.0 (25.2 to 74.8)"


def test_a_missing_temperature_leaves_its_own_cell_empty():
    def row(method, found):
        passes = {t: {"accuracy": 0.1, "pass_at": {"8": value}} for t, value in found.items()}
        return {"question": "main", "task": "stories", "method": method, "pass": passes}

    rows = [row("sft", {"0.2": 0.1, "0.6": 0.3}), row("luffy", {"0.2": 0.4, "0.4": 0.5, "0.6": 0.6})]
    _, _, sft, luffy = figures.pass_table(rows).splitlines()
    assert sft == "| stories | SFT | 10.0 (6.9 to 14.3) |  | 30.0 (24.7 to 35.9) |"
    assert [cell.split(" (")[0] for cell in luffy.split(" | ")[2:]] == ["40.0", "50.0", "60.0"]


def test_a_set_that_only_some_runs_were_asked_is_shown_for_those():
    rows = [{"method": "luffy", "curves": {"a": [[0, 0.0], [60, 0.5]]}}, {"method": "luffy", "curves": {}}]
    assert figures.accuracy(rows, "a", 256) == "50.0 (43.9 to 56.1)" and figures.accuracy(rows, "b", 256) == "not run"
