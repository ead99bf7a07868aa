"""The quickstart command: its files, its table, and (slow) its result over three seeds."""

import contextlib
import io
import json

import pytest

from luffy.quickstart.run import quickstart
from luffy.quickstart.task import write_dataset


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of a quickstart of two steps, its outcomes, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        outcomes = quickstart(folder, seeds=1, steps=2)
    return folder, outcomes, printed.getvalue()


def test_a_short_quickstart_leaves_summary_and_report(short):
    folder, _, printed = short
    summary = json.loads((folder / "summary.json").read_text())["methods"]
    assert set(summary) == {"on-policy", "sft", "luffy"}
    assert all(set(m["seeds"]) == {"0"} and m["start"] == 0.0 for m in summary.values())
    assert (folder / "report.html").stat().st_size > 10_000
    assert "Right answers after training in percent, 1 seed" in printed


def test_a_finished_quickstart_is_not_trained_again(short):
    folder, first, _ = short
    written = {p: p.stat().st_mtime_ns for p in folder.rglob("metrics.jsonl")}
    assert quickstart(folder, seeds=1, steps=2) == first
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("metrics.jsonl")} == written


def test_the_shipped_problems_are_the_generated_ones(tmp_path):
    from luffy.config import PACKAGE

    for name, path in write_dataset(tmp_path, seed=0).items():
        assert path.read_text() == (PACKAGE / "quickstart" / "assets" / "data" / f"{name}.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_luffy_succeeds_where_on_policy_fails_over_three_seeds(tmp_path):
    outcomes = quickstart(tmp_path, seeds=3)
    assert all(o.heldout < 0.10 and o.ood < 0.10 for o in outcomes["on-policy"].values())
    assert all(o.heldout > 0.60 for o in outcomes["luffy"].values())
