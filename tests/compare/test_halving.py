"""A comparison with trainings that a table replaces: who goes on, what a kill leaves, what is said at the end."""

import json
import subprocess
import sys

import pytest
import yaml
from builders import write_rows
from commands import luffy

from luffy.compare import halving
from luffy.compare.arms import arms_of, named_methods
from luffy.compare.base_holder import Room
from luffy.compare.halving import Asked, Halving, compare_methods, rates_in, rung_sizes, seconds_in
from luffy.compare.held_out import split_data
from luffy.compare.process import Ended
from luffy.compare.state import State
from luffy.config import load_config
from luffy.errors import UserError
from luffy.run_folder.runs import flat_config

SCORES = {"luffy-lr0.0003": 0.5, "luffy-lr0.001": 0.9, "on-policy-lr0.0003": 0.1, "sft-rl-lr0.0003": 0.6}


@pytest.fixture
def cfg(tmp_path):
    rows = [{"prompt": f"{i}+1=?", "answer": str(i + 1), "traces": [f"#### {i + 1}"]} for i in range(80)]
    write_rows(tmp_path / "train.jsonl", [{"id": str(i), **row} for i, row in enumerate(rows)])
    return load_config("tiny/luffy", {"data.train": str(tmp_path / "train.jsonl"), "out": str(tmp_path / "runs")})


@pytest.fixture
def table_of_scores(monkeypatch):
    """Trainings and evaluations by SCORES; returns the arms trained, in order."""
    trained = []

    def train(self, arms, target):
        for arm in arms:
            trained.append(arm.name)
            folder = arm.cfg.folder
            (folder / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "timing_s/step": target}) + "\n")
        failed = [arm.candidate not in SCORES for arm in arms]
        return [Ended(False, "stopped: 3 updates in a row were not finite" if no else "") for no in failed]

    def accuracies(self, arms, data, name):
        n = 16
        return [{str(i): float(i < round(SCORES[arm.candidate] * n)) for i in range(n)} for arm in arms]

    monkeypatch.setattr(Halving, "_train", train)
    monkeypatch.setattr(Halving, "_accuracies", accuracies)
    return trained


def asked(cfg, tmp_path, **changes):
    values = {
        "methods": ["luffy", "on_policy", "sft_rl"],
        "lrs": [3e-4, 1e-3],
        "seeds": 1,
        "budget": 7200.0,
        "at_once": 1,
    }
    return Asked(cfg, **{**values, "out": tmp_path / "out", **changes})


def test_half_goes_on_and_the_best_is_tested(cfg, tmp_path, table_of_scores):
    said = []
    outcome = compare_methods(asked(cfg, tmp_path), said.append)
    assert [row.name for row in outcome.rows[:2]] == ["luffy-lr0.001", "sft-rl-lr0.0003"]
    fates = {row.name: row.fate for row in outcome.rows}
    assert fates["on-policy-lr0.0003"].startswith("dropped") and fates["luffy-lr0.0003"].startswith("dropped")
    assert fates["sft-rl-lr0.001"] == "failed: stopped: 3 updates in a row were not finite"
    folders = (tmp_path / "out" / "arms").glob("*/checkpoints")
    assert sorted(f.parent.name for f in folders) == ["luffy-lr0.001-s0", "sft-rl-lr0.0003-s0"]
    seconds = {row.name: row.seconds for row in outcome.rows}
    assert seconds["luffy-lr0.001"] == seconds["sft-rl-lr0.0003"] > seconds["on-policy-lr0.0003"] > 0
    assert "| luffy-lr0.001 | 1 |" in (tmp_path / "out" / "compare.md").read_text()
    before = len(table_of_scores)
    again = compare_methods(asked(cfg, tmp_path), said.append)
    assert len(table_of_scores) == before and again.words == outcome.words  # nothing is made twice
    with pytest.raises(UserError, match="has a comparison of another recipe"):
        compare_methods(asked(cfg, tmp_path, seeds=2), said.append)


def test_a_killed_comparison_goes_on_where_it_was(cfg, tmp_path, table_of_scores, monkeypatch):
    train = Halving._train

    def killed(self, arms, target):
        if len(table_of_scores) == 4:
            raise KeyboardInterrupt
        return train(self, arms, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Halving, "_train", killed)
        compare_methods(asked(cfg, tmp_path), lambda line: None)
    first = list(table_of_scores)
    outcome = compare_methods(asked(cfg, tmp_path), lambda line: None)
    assert len(set(first)) == 4 and not set(first) & set(table_of_scores[4:6])  # the first rung has two arms left
    assert outcome.rows[0].name == "luffy-lr0.001"


def test_a_winner_has_a_recipe_on_all_of_the_data(cfg, tmp_path, table_of_scores, monkeypatch):
    monkeypatch.setitem(SCORES, "sft-rl-lr0.0003", 0.2)
    monkeypatch.setitem(SCORES, "luffy-lr0.0003", 0.1)
    outcome = compare_methods(asked(cfg, tmp_path), lambda line: None)
    assert outcome.words[0] == "Winner: luffy-lr0.001."
    winner = load_config(tmp_path / "out" / "winner.yaml")
    assert (winner.optim.lr, winner.data, winner.name) == (1e-3, cfg.data, "tiny-luffy-luffy")


def test_a_comparison_whose_arms_all_fail_is_a_failure(cfg, tmp_path, table_of_scores):
    where = [f"data.train={cfg.data.train}", "--out", tmp_path / "out", "--at-once", "1"]
    done = luffy("compare", "tiny/luffy", "--methods", "on_policy,sft", "--lrs", "1", "--budget", "2h", *where)
    assert done.returncode == 2 and "no arm reached the test; mend what the table names" in done.stderr
    assert done.stdout.count("failed: stopped: 3 updates in a row were not finite") == 2


def test_a_spent_budget_opens_the_test_at_once(cfg, tmp_path, table_of_scores, monkeypatch):
    monkeypatch.setattr(halving, "FIRST_OVERHEAD_S", 0.0)
    said = []
    outcome = compare_methods(asked(cfg, tmp_path, budget=1e-3), said.append)
    assert "the budget is spent: the best so far are tested" in said and len(table_of_scores) == 6
    assert sum(row.test is not None for row in outcome.rows) == 2
    monkeypatch.setattr(halving, "FIRST_OVERHEAD_S", 15.0)
    with pytest.raises(UserError, match="leaves 6 arms no time to train"):
        compare_methods(asked(cfg, tmp_path, budget=60.0, out=tmp_path / "other"), said.append)


def test_an_arm_is_the_users_recipe_with_another_method(cfg, tmp_path):
    split = split_data(cfg, tmp_path / "data", None)
    mine = load_config("tiny/luffy", {"data.train": cfg.data.train, "algorithm.kl_coef": 0.1, "rollout.n": 6})
    luffy, on_policy, sft_rl, sft = arms_of(mine, ["luffy", "on_policy", "sft_rl", "sft"], [1e-3], 1, split, tmp_path)
    assert {arm.cfg.optim.lr for arm in (luffy, on_policy, sft_rl, sft)} == {1e-3}
    assert {(arm.cfg.algorithm.kl_coef, arm.cfg.rollout.n) for arm in (luffy, on_policy, sft_rl)} == {(0.1, 6)}
    assert (luffy.cfg.guidance.n_prefix, on_policy.cfg.guidance.n_prefix, list(sft_rl.cfg.stages)) == (
        1,
        0,
        ["sft", "rl"],
    )
    assert (luffy.trained_by, sft_rl.trained_by, sft.trained_by) == ("rl", "rl", "sft")
    one = flat_config(load_config("tiny/on_policy"))
    apart = {k for k, v in flat_config(on_policy.cfg).items() if one.get(k) != v}
    assert {key for key in apart if key.startswith(("algorithm", "guidance"))} == {"algorithm.kl_coef"}
    with pytest.raises(UserError, match=r"no method 'lufy' \(did you mean 'luffy'\?\)"):
        named_methods("lufy")


def test_times_rates_and_rungs():
    assert [seconds_in(text) for text in ("90", "90s", "6m", "2h", "0.5h")] == [90, 90, 360, 7200, 1800]
    for wrong in ("", "m", "-3m", "soon", "nan"):
        with pytest.raises(UserError, match="write a time"):
            seconds_in(wrong)
    assert rates_in(None) == [] and rates_in("1e-6,3e-6,1e-6") == [1e-6, 3e-6]
    with pytest.raises(UserError, match="write learning rates"):
        rates_in("fast")
    assert [rung_sizes(n) for n in (1, 2, 3, 6, 9)] == [[1], [2], [3, 2], [6, 3, 2], [9, 5, 3, 2]]
    assert [rung_sizes(n, most=2) for n in (3, 6, 9)] == [[3, 2], [6, 4, 2], [9, 6, 4, 2]]  # 3 would leave a place free
    assert rung_sizes(6, seeds=2, most=2) == [6, 3, 2]
    assert rung_sizes(4, most=3) == [4, 2], "no more than two are tested, whatever has room"


def test_a_budget_keeps_room_for_the_test(cfg, tmp_path):
    for spent, is_spent in ((20.0, False), (41.0, True)):
        state = State("x", spent, overhead=[30.0])  # of a round, and the test of two has two of them
        one = Halving(
            asked(cfg, tmp_path, budget=100.0, out=tmp_path), state, [], tmp_path, tmp_path, str, Room(1, "", 1)
        )
        assert one._is_spent() == is_spent


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_command_on_the_tiny_recipe(tmp_path):
    command = ["compare", "tiny/luffy", "--methods", "luffy,on_policy,sft_rl", "--budget", "6m", "--lrs", "1e-3"]
    command += ["--at-once", "3", "--held-out", "32", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "luffy", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| finalist |") == 2 and (tmp_path / "out" / "compare.html").is_file()
    assert (tmp_path / "out" / "compare.svg").is_file()
    state = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert state["at_once"][0] == 3 and all(len(arm["at"]) == len(arm["rungs"]) for arm in state["arms"].values())
    assert {arm["status"] for arm in state["arms"].values()} <= {"in", "dropped"}
    recipe = yaml.safe_load((tmp_path / "out" / "recipes" / "luffy-lr0.001-s0.yaml").read_text())
    assert recipe["data"]["train"].endswith("train.jsonl")


def test_the_last_two_are_of_different_methods(cfg, tmp_path, table_of_scores, monkeypatch):
    """Two rates of one method, level at the top, would leave nothing to say about the methods."""
    monkeypatch.setitem(SCORES, "sft-rl-lr0.0003", 0.95)
    monkeypatch.setitem(SCORES, "sft-rl-lr0.001", 0.9)
    monkeypatch.setitem(SCORES, "luffy-lr0.001", 0.3)
    outcome = compare_methods(asked(cfg, tmp_path), lambda line: None)
    assert [row.name for row in outcome.rows if row.test is not None] == ["sft-rl-lr0.0003", "luffy-lr0.0003"]
    assert outcome.words[0] == "Winner: sft-rl-lr0.0003."
    assert halving.best_of_each([("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")]) == ["a1", "b1", "a2", "b2"]


def test_arms_side_by_side_are_as_many_in_every_round_of_a_rung(cfg, tmp_path, table_of_scores, monkeypatch):
    train, seen = Halving._train, []

    def counted(self, arms, target):
        seen.append((target, len(arms)))
        return train(self, arms, target)

    monkeypatch.setattr(Halving, "_train", counted)
    said = []
    one_by_one = compare_methods(asked(cfg, tmp_path), said.append)
    alone = json.loads((tmp_path / "out" / "compare.json").read_text())
    seen.clear()
    outcome = compare_methods(asked(cfg, tmp_path, at_once=4, out=tmp_path / "four"), said.append)
    state = json.loads((tmp_path / "four" / "compare.json").read_text())
    assert [row.name for row in outcome.rows[:2]] == [row.name for row in one_by_one.rows[:2]]
    assert state["at_once"] == [3, 4, 2]  # of 6, 4 and 2 arms
    assert [number for _, number in seen] == [3, 3, 4, 2] and alone["at_once"] == [1, 1, 1]
    assert state["targets"][0] > 2.5 * alone["targets"][0]  # two rounds in the time of six
    assert len({target for target, _ in seen[:2]}) == 1
    assert "at most 4 at once (--at-once)" in said and "3 at once" in said[-1] + "".join(said)


def test_a_resumed_rung_keeps_its_number_and_trains_what_is_left(cfg, tmp_path, table_of_scores, monkeypatch):
    train = Halving._train

    def killed(self, arms, target):
        if len(table_of_scores) == 2:
            raise KeyboardInterrupt
        return train(self, arms, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Halving, "_train", killed)
        compare_methods(asked(cfg, tmp_path, at_once=2), lambda line: None)
    compare_methods(asked(cfg, tmp_path, at_once=6), lambda line: None)
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["at_once"][0] == 2
    assert len(set(table_of_scores[:6])) == 6  # the first two are not trained again in the first rung


@pytest.mark.parametrize("name", ["validation-1", "test"])
def test_a_resumed_comparison_measures_nothing_twice(cfg, tmp_path, table_of_scores, monkeypatch, name):
    measure, measured, lost = Halving._accuracies, [], []

    def noted(self, arms, data, what):
        if not lost and what == name in [earlier for _, earlier in measured]:
            lost.extend(arm.name for arm in arms)
            raise KeyboardInterrupt
        measured.extend((arm.name, what) for arm in arms)
        return measure(self, arms, data, what)

    monkeypatch.setattr(Halving, "_accuracies", noted)
    with pytest.raises(KeyboardInterrupt):
        compare_methods(asked(cfg, tmp_path), lambda line: None)
    compare_methods(asked(cfg, tmp_path), lambda line: None)
    assert (lost[0], name) in measured and len(set(measured)) == len(measured)
    state = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert max(len(arm["rungs"]) for arm in state["arms"].values()) == len(state["targets"]) == 3
    assert state["targets"][1] - state["targets"][0] == pytest.approx(7200 / 2 / 3, rel=0.1), (
        "three arms, two rungs left"
    )


def test_the_last_rung_decides_who_goes_on(cfg, tmp_path, table_of_scores, monkeypatch):
    measure = Halving._accuracies

    def fading(self, arms, data, what):
        found = measure(self, arms, data, what)
        faded = [what == "validation-2" and arm.candidate == "luffy-lr0.001" for arm in arms]
        return [dict.fromkeys(items, 0.0) if no else items for items, no in zip(found, faded, strict=True)]

    monkeypatch.setattr(Halving, "_accuracies", fading)
    rows = compare_methods(asked(cfg, tmp_path), lambda line: None).rows
    assert [row.name for row in rows if row.test is not None] == ["sft-rl-lr0.0003", "luffy-lr0.0003"]
    assert next(row.validation for row in rows if row.name == "luffy-lr0.001") == 0.0
