"""The quickstart command: its files, its table, and (slow) its result over three seeds."""

import contextlib
import io
import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from luffy.config.recipes import BUILT_IN_RECIPES
from luffy.errors import StopRequested, TrainingStopped, UserError
from luffy.quickstart import run
from luffy.quickstart.run import MethodOutcome, choose_methods, configure, quickstart, table
from studies.quickstart.task import write_dataset


@contextlib.contextmanager
def few_evaluated():
    """Every evaluation takes 8 problems of each set instead of all 200, and the first tokens of an answer."""

    def small(*args):
        cfg = configure(*args)
        return replace(cfg, eval=replace(cfg.eval, limit=8, max_tokens=12))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "configure", small)
        yield


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of a quickstart of two steps, its outcomes, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    with few_evaluated(), contextlib.redirect_stdout(io.StringIO()) as printed:
        outcomes = quickstart(folder, seeds=1, steps=2)
    return folder, outcomes, printed.getvalue()


def test_a_short_quickstart_leaves_summary_and_report(short):
    folder, _, printed = short
    summary = json.loads((folder / "summary.json").read_text())["methods"]
    assert set(summary) == {"on-policy", "sft", "luffy"}
    assert all(set(m["seeds"]) == {"0"} and m["start"] == 0.0 for m in summary.values())
    assert (folder / "report.html").stat().st_size > 10_000
    assert "Correct answers after training in percent, 1 seed" in printed


def test_a_finished_quickstart_is_neither_trained_nor_evaluated_again(short, capsys):
    folder, first, _ = short
    written = {p: p.stat().st_mtime_ns for p in folder.glob("*/seed-0/*")}
    assert {p.name for p in written} >= {"metrics.jsonl", "quickstart.json"}
    with few_evaluated():
        assert quickstart(folder, seeds=1, steps=2, as_json=True) == first
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads((folder / "summary.json").read_text())  # and nothing else
    assert "Correct answers after training" in said.err
    assert {p: p.stat().st_mtime_ns for p in folder.glob("*/seed-0/*")} == written


def test_fewer_steps_than_a_folder_has_are_refused_before_anything_is_written(short):
    folder, _, _ = short
    written = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    with few_evaluated(), pytest.raises(UserError, match=r"seed-0 is trained up to step 2 already, and 1 .* --out"):
        quickstart(folder, seeds=1, steps=1)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == written


def test_all_methods_are_those_that_have_a_recipe():
    chosen = choose_methods("all")
    assert sorted(chosen) == sorted(path.stem for path in (BUILT_IN_RECIPES / "methods").glob("*.yaml"))
    assert max(map(chosen.index, ("sft", "luffy"))) < min(map(chosen.index, ("exgrpo", "guided")))


def test_methods_are_run_in_the_order_given_and_those_that_need_sft_bring_it():
    assert choose_methods("on-policy, sft,luffy,sft") == ["on_policy", "sft", "luffy"]
    assert choose_methods("guided,mixed") == ["sft", "mixed", "guided"]
    with pytest.raises(UserError, match=r"no method 'lufy' \(did you mean 'luffy'\?\)"):
        choose_methods("lufy")
    with pytest.raises(UserError, match="names none; there are .*luffy"):
        choose_methods(" ,")


def test_methods_that_need_sft_have_its_model_of_the_same_seed(tmp_path):
    model = str(tmp_path / "sft" / "seed-2" / "checkpoints" / "latest" / "model")
    assert configure(tmp_path, "exgrpo", 2, None).model.path == model
    assert configure(tmp_path, "guided", 2, None).rollout.offpolicy_guidance.model_path == model
    assert configure(tmp_path, "sft", 2, None).folder == tmp_path / "sft" / "seed-2"


def test_a_method_that_fails_is_named_and_the_others_go_on(tmp_path, capsys):
    (tmp_path / "luffy").write_text("where its folder should be")
    with few_evaluated(), pytest.raises(TrainingStopped, match="failed: luffy/seed-0; see the errors above and in"):
        quickstart(tmp_path, seeds=1, steps=1, methods="luffy,sft")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["methods"]) == ["sft"]
    assert list(summary["failed"]) == ["luffy/seed-0"]
    assert "luffy/seed-0 failed" in capsys.readouterr().err


def test_a_method_that_fails_before_there_is_a_folder_is_named(tmp_path, monkeypatch):
    def fail(*_):
        raise UserError("not today")

    monkeypatch.setattr(run, "run_one", fail)
    with pytest.raises(TrainingStopped, match="failed: luffy/seed-0; see the errors above and in"):
        quickstart(tmp_path / "new" / "folder", seeds=1, steps=1, methods="luffy")
    summary = json.loads((tmp_path / "new" / "folder" / "summary.json").read_text())
    assert summary == {"methods": {}, "failed": {"luffy/seed-0": "UserError: not today"}}


def test_a_request_to_stop_ends_the_quickstart(tmp_path):
    def stop_at_the_first_step():
        records = tmp_path / "sft" / "seed-0" / "metrics.jsonl"
        while not records.exists() or '"step": 1,' not in records.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_at_the_first_step, daemon=True).start()
    with few_evaluated(), pytest.raises(StopRequested, match="the same command goes on there"):
        quickstart(tmp_path, seeds=1, steps=2000, methods="sft,mixed")
    assert not (tmp_path / "mixed").exists()


def test_twenty_methods_fit_into_80_columns():
    outcome = MethodOutcome(start=0.0, heldout=1.0, heldout_greedy=1.0, ood=1.0, ood_greedy=1.0, seconds=120.0)
    worse = MethodOutcome(start=0.0, heldout=0.5, heldout_greedy=1.0, ood=1.0, ood_greedy=1.0, seconds=120.0)
    outcomes = {f"prefix-rft-{i:02}": {0: outcome, 1: worse if i < 19 else outcome} for i in range(20)}
    console = Console(file=io.StringIO(), width=80)
    console.print(table(outcomes))
    lines = console.file.getvalue().splitlines()
    rows = [line for line in lines if "prefix-rft" in line]
    assert len(rows) == 20 and all(len(line) <= 80 and "…" not in line for line in lines)
    assert rows[0].split()[:4] == ["prefix-rft-19", "0.0", "100.0", "±0.0"]  # the best first
    assert rows[1].split()[2:4] == ["75.0", "±25.0"]


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
