"""The study on Qwen2.5: its plan, its contests, what it keeps of a run, and a driver that loses nothing."""

import json
import math
import os
import re
import statistics
import sys
import textwrap
from itertools import combinations, product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from builders import write_rows

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from luffy.config import load_config  # noqa: E402
from studies.qwen import data as sets  # noqa: E402
from studies.qwen import plan, records  # noqa: E402
from studies.qwen import run as driver  # noqa: E402

CHOSEN = dict.fromkeys(plan.METHODS, 3e-6) | {"sft": 1e-5}


def test_every_run_of_the_plan_is_a_recipe_that_loads(tmp_path):
    runs = plan.runs_of(plan.plan(CHOSEN))
    names = [run.name for run in runs]
    assert len(set(names)) == len(names) > 40
    for run in runs:
        path = tmp_path / "recipe.yaml"
        recipe = run.recipe(tmp_path / "base", tmp_path / "data", tmp_path, tmp_path / "1.5b")
        path.write_text(yaml.safe_dump(recipe))
        cfg = load_config(path)
        assert cfg.teacher.path == (str(tmp_path / "1.5b") if run.method == "opd" else None)
        assert (cfg.name, cfg.seed, cfg.optim.lr, cfg.train.steps) == (run.name, run.seed, run.lr, run.steps)
        start = tmp_path / "base" if run.start is None else tmp_path / run.start / "model"
        assert cfg.model.path == str(start) and cfg.data.eval == str(tmp_path / "data" / "val.jsonl")
        assert run.start is None or run.start in names
        assert cfg.batch.problems == 64 and cfg.batch.mini_batch == (None if run.kind == "sft" else 32)
        assert cfg.data.system_prompt.endswith("\\boxed{}.") and cfg.reward.kind == "gsm8k"


def test_methods_differ_in_what_they_are(tmp_path):
    recipes = {}
    for method in plan.METHODS:
        path = tmp_path / f"{method}.yaml"
        path.write_text(yaml.safe_dump(plan.Run(method, 1e-6).recipe(tmp_path, tmp_path, tmp_path, tmp_path)))
        recipes[method] = load_config(path)
    seen = {m: (c.guidance.n_prefix, c.algorithm.off_policy_reshape.shown, c.algorithm.remove_clip, c.algorithm.trace_term)
            for m, c in recipes.items() if m != "sft"}  # fmt: skip
    assert seen["luffy"] == (1, "p_div_p (gamma 0.1)", True, "rl") and seen["luffy_clip"] == (
        1,
        "p_div_p (gamma 0.1)",
        False,
        "rl",
    )
    assert seen["mixed"] == (1, "no_reshape", False, "rl")
    assert seen["on_policy"][0] == seen["sft_rl"][0] == 0 and seen["rl_sft_loss"][3] == "sft"


def test_what_short_runs_change_of_their_methods(tmp_path):
    algorithm = {}
    for run in plan.runs_of(plan.plan(CHOSEN)):
        if run.note == "short":
            path = tmp_path / f"{run.method}.yaml"
            path.write_text(yaml.safe_dump(run.recipe(tmp_path, tmp_path, tmp_path, tmp_path)))
            algorithm[run.method] = load_config(path).algorithm
    mix = algorithm["chord"].mix
    assert (mix.start, mix.end, mix.steps) == (0.9, 0.05, plan.SHORT_STEPS)
    assert (algorithm["hpt"].sft_coef, algorithm["hpt_light"].sft_coef) == (1.0, 0.05)
    assert algorithm["hpt_light"].credit == algorithm["hpt"].credit


def test_the_runs_with_the_released_coefficients_have_those_of_the_papers_recipes(tmp_path):
    runs = [run for run in plan.runs_of(plan.plan({})) if run.note == "released"]
    assert [(run.name, run.steps) for run in runs] == [
        ("rl_sft_loss-released-lr1e-06-s0", 200), ("luffy-released-lr1e-06-s0", 200)
    ]  # fmt: skip
    released = {}
    for run in runs:
        path = tmp_path / f"{run.method}.yaml"
        path.write_text(yaml.safe_dump(run.recipe(tmp_path, tmp_path, tmp_path)))
        released[run.method] = load_config(path).algorithm
    paper = {method: load_config(f"paper/{method}_released").algorithm for method in released}
    assert released["rl_sft_loss"].sft_coef == paper["rl_sft_loss"].sft_coef
    assert released["luffy"].entropy_coef == paper["luffy"].entropy_coef


def test_what_the_study_left_open_and_what_may_beat_sft_then_rl_are_planned(tmp_path):
    chosen = {"sft": 3e-5, "sft_rl": 1e-6, "luffy": 3e-6}
    runs = plan.runs_of(plan.plan(chosen))
    assert [(run.name, run.steps) for run in runs if 9 in run.questions] == [
        *((f"luffy-long-lr1e-06-s{seed}", 200) for seed in plan.SEEDS),
        ("luffy-long-entropy0.01-lr1e-06-s0", 200), ("luffy-long-entropy0.001-lr1e-06-s0", 200),
    ]  # fmt: skip
    after = [run for run in runs if run.method == "sft_luffy" or 10 in run.questions]
    assert {(run.method, run.seed) for run in after} == {
        (method, seed) for method in ("sft_luffy", *plan.AFTER_SFT) for seed in plan.SEEDS
    }
    cfg = {}
    for run in after:
        assert run.start == (None if run.method == "sft_flat" else f"sft-lr3e-05-s{run.seed}") and run.lr == 1e-6
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(run.recipe(tmp_path, tmp_path, tmp_path)))
        cfg[run.method] = load_config(path)
    gates = {method: str(cfg[f"sft_{method}"].guidance.gate) for method in ("ampo", "trapo", "ghpo")}
    assert gates == {"ampo": "likeliest_traces", "trapo": "micro_groups", "ghpo": "hinted_group"}
    assert cfg["sft_exgrpo"].replay.share == 0.5 and cfg["sft_maxrl"].algorithm.credit == "maxrl"
    assert cfg["sft_dynamic"].algorithm.oversample_rounds == 9 and list(cfg["sft_flat"].stages) == ["sft", "rl"]
    assert cfg["sft_flat"].stages["sft"]["until"] == "flat_loss"


def test_the_table_of_released_coefficients_has_the_run_without_them_above(figures, by_name):
    rows = figures.read()
    assert figures.released(rows) == "" or any(row.get("note") == "released" for row in rows)
    plain = by_name["rl_sft_loss-lr1e-06-s0"]
    rows = [row for row in rows if row.get("note") != "released"]
    table = figures.released([*rows, {**plain, "note": "released", "name": "rl_sft_loss-released-lr1e-06-s0"}])
    assert [line.split(" | ")[1] for line in table.splitlines()[-2:]] == ["as in the study", "SFT coefficient 0.09"]


def test_what_depends_on_a_choice_waits_for_it():
    early = [unit.method for unit in plan.plan({}) if isinstance(unit, plan.Contest)]
    assert early == ["luffy", "on_policy", "sft", "mixed", "rl_sft_loss", "luffy_clip"]
    # 18 of contests, 2 with the released coefficients, 5 of LUFFY at 1e-6
    assert len(plan.runs_of(plan.plan({}))) == 25
    later = plan.runs_of(plan.plan({"sft": 3e-5}))
    assert {run.start for run in later if run.method == "sft_rl" and run.seed == 0} == {"sft-lr3e-05-s0"}


def test_losers_end_at_their_rung_and_not_before_all_have_reached_it():
    rungs = {50: 2, 100: 1}
    behind = {"a": {50: 0.3}, "b": {50: 0.4}, "c": {25: 0.2}}
    assert driver.losers(rungs, behind) == []
    behind["c"][50] = 0.35
    assert driver.losers(rungs, behind) == [("a", 50)]
    del behind["a"]
    behind["b"][100] = 0.1
    assert driver.losers(rungs, behind) == []  # c has not reached 100
    behind["c"][100] = 0.2
    assert driver.losers(rungs, behind) == [("b", 100)]
    assert driver.losers({}, behind) == []


def contest_row(method, lr, status, accuracy=0.5, seed=0, note="", step=10):
    curves = {"step": [0, step], "val-core/accuracy": [0.1, accuracy]}
    return {"name": f"{method}-lr{lr:g}-s{seed}", "method": method, "lr": lr, "status": status, "seed": seed,
            "note": note, "steps": 200, "curves": curves} | ({"test": {}} if status == "finished" else {})  # fmt: skip


def test_a_rate_is_chosen_when_its_contest_is_decided():
    luffy = [
        contest_row("luffy", 1e-6, "dropped", 0.9),
        contest_row("luffy", 3e-6, "finished"),
        contest_row("luffy", 1e-5, "dropped"),
    ]
    sft = [contest_row("sft", lr, "finished", a) for lr, a in ((3e-6, 0.3), (1e-5, 0.5), (3e-5, 0.4))]
    running = [
        contest_row("mixed", 1e-6, "dropped"),
        contest_row("mixed", 3e-6, "running"),
        contest_row("mixed", 1e-5, "dropped"),
    ]
    others = [contest_row("on_policy", 1e-6, "finished"), contest_row("luffy", 1e-4, "finished", 0.99, seed=1)]
    assert records.best_rates([*luffy, *sft, *running, *others]) == {"luffy": 3e-6, "sft": 1e-5}


def test_what_an_earlier_machine_dropped_goes_on_if_the_rungs_of_today_let_it():
    curves = {1e-6: {25: 0.3, 100: 0.4}, 3e-6: {25: 0.4, 100: 0.5}, 1e-5: {25: 0.2}}
    known = {}
    for lr, found in curves.items():
        one = contest_row("luffy", lr, "dropped")
        one["curves"] = {"step": list(found), "val-core/accuracy": list(found.values())}
        known[one["name"]] = one
    assert driver.lost_before(known) == {"luffy-lr1e-05-s0"}
    del known["luffy-lr3e-06-s0"]
    assert driver.lost_before(known) == set()


def test_time_on_the_gpu_is_shared_by_those_who_used_it():
    jobs = [{"time": t, "job": j, "what": w} for t, j, w in (
        (0, "a", "started"), (10, "b", "started"), (20, "c", "started"), (23, "a", "ended"), (31, "c", "ended"))]  # fmt: skip
    assert records.gpu_seconds(jobs, "b", [12, 20, 23, 31, 35]) == [1.0, 5.0, 6.0, 10.0, 14.0]
    assert records.gpu_seconds(jobs, "a", [5, 10]) == [5.0, 10.0]
    again = [*jobs, {"time": 40, "job": "a", "what": "started"}]  # resumed, beside b
    assert records.gpu_seconds(again, "a", [5, 23, 35, 50]) == [5.0, 16.0, 16.0, 21.0]
    assert records.gpu_seconds(again, "a", [5, 50]) == [5.0, 21.0]  # up to its end, which was noted
    killed = [*jobs, {"time": 40, "job": "b", "what": "started"}]  # nobody noted its end: it counts up to its last step
    assert records.gpu_seconds(killed, "b", [12, 35, 50]) == [1.0, 14.0, 24.0]
    assert records.gpu_seconds(killed, "b", [50]) == [10.0]  # killed before its first step
    beside = [*jobs, {"time": 33, "job": "a", "what": "started"}, killed[-1]]  # the other's kill takes nothing from it
    assert records.gpu_seconds(beside, "a", [5, 50]) == [5.0, 24.5]


def test_curves_are_columns_and_rows_of_several_machines_are_one(tmp_path):
    metrics = [
        {"step": 0, "time": 1.0, "val-core/accuracy": 0.25},
        {"step": 1, "time": 2.0, "actor/grad_norm": 0.123456},
    ]
    assert records.curves(metrics) == {
        "step": [0, 1],
        "actor/grad_norm": [None, 0.1235],
        "val-core/accuracy": [0.25, None],
    }
    cut, again = contest_row("luffy", 1e-6, "cut", step=50), contest_row("luffy", 1e-6, "running", step=20)
    sft, bare = contest_row("sft", 1e-5, "finished"), contest_row("sft", 1e-5, "finished")
    del bare["test"]
    files = [write_lines(tmp_path / "a", [cut, sft]), write_lines(tmp_path / "b", [again, bare])]
    assert records.read_rows(files) == {cut["name"]: cut, sft["name"]: sft}
    evaluated = write_lines(tmp_path / "d", [bare | {"suites": {"arc_c": {}}, "curves": {"step": [10]}}])
    assert records.read_rows([*files, evaluated])[sft["name"]] == sft | {"suites": {"arc_c": {}}}
    other = write_lines(tmp_path / "f", [bare | {"suites": {"math500": {}}}])
    both = records.read_rows([*files, evaluated, other])[sft["name"]]
    assert both == sft | {"suites": {"arc_c": {}, "math500": {}}}
    unfinished = write_lines(tmp_path / "e", [contest_row("sft", 1e-5, "cut") | {"suites": {}}])
    assert records.read_rows([unfinished, *files])[sft["name"]] == sft
    later = write_lines(tmp_path / "c", [contest_row("sft", 1e-5, "finished", 0.9)])
    assert records.read_rows([*files, later])[sft["name"]]["curves"]["val-core/accuracy"] == [0.1, 0.9]


def test_validation_problems_are_not_trained_on(tmp_path):
    traces = [{"token_ids": [1, 2], "log_probs": [-0.5, -1.0]}] * 4
    rows = [{"id": f"train:{i}", "prompt": f"p{i}", "answer": str(i), "traces": traces[: i % 5]} for i in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "traces.parquet")
    lines = "".join(json.dumps({"question": f"p{i}", "answer": f"#### {i}"}) + "\n" for i in range(600))
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(lines)
    out = tmp_path / "out"
    screened = {row["id"]: i % 2 for i, row in enumerate(rows[:500])}
    counts = sets.make(tmp_path, tmp_path / "traces.parquet", out, screened, benchmarks=tmp_path)
    assert (out / "benchmarks" / "traces.parquet").exists()
    assert counts["validation"] == 512 and counts["train"] == counts["train-human"] == 88
    held_out = {json.loads(line)["prompt"] for line in (out / "val.jsonl").read_text().splitlines()}
    train = {
        name: pq.read_table(out / f"{name}.parquet").to_pylist()
        for name in counts
        if name.startswith("train-") and name != "train-human"
    }
    train["train"] = pq.read_table(out / "train.parquet").to_pylist()
    assert all(not held_out & {row["prompt"] for row in found} for found in train.values())
    human = {json.loads(line)["question"] for line in (out / "train-human.jsonl").read_text().splitlines()}
    assert human == {row["prompt"] for row in train["train"]}
    hard = [int(row["id"].split(":")[1]) for row in train["train-hard"]]
    assert hard and all(number % 2 == 0 and number < 500 for number in hard)
    assert max(len(row["traces"]) for row in train["train-traces1"]) == 1
    assert "log_probs" not in train["train"][0]["traces"][0] if train["train"][0]["traces"] else True


NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?!\w)")


@pytest.fixture(scope="module")
def figures():
    pytest.importorskip("matplotlib")
    from studies.qwen import figures

    return figures


@pytest.fixture(scope="module")
def prose(figures):
    """The page's text without its tables and the other study, in one line."""
    lines = figures.PAGE.read_text(encoding="utf-8").partition("\n## Appendix")[0].splitlines()
    return " ".join(" ".join(line for line in lines if not line.startswith("|")).split())


@pytest.fixture(scope="module")
def by_name(figures):
    return {row["name"]: row for row in figures.read()}


def points_ahead(figures, ones, others, score=None):
    """A difference as prose has it: ``2.4 points (0.5 to 4.2)``."""
    found = figures.difference(ones, others, score or figures.shares)
    return re.sub(r"^(\S+) ", r"\1 points ", found).replace("+", "")


def test_the_page_says_what_the_results_say(figures):
    text, rows = figures.PAGE.read_text(encoding="utf-8"), figures.read()
    assert figures.fill(text, rows) == text and all(f"<!-- {name} -->" in text for name in figures.TABLES)
    summary = figures.SUMMARY.read_text(encoding="utf-8")
    assert figures.fill(summary, rows) == summary and "<!-- main -->" in summary
    cells = {cell for line in text.splitlines() if line.startswith("|") for cell in NUMBER.findall(line)}
    table = summary.partition("## The newer methods")[2].partition("## Generalisation")[0].splitlines()
    assert {n for line in table if line.startswith("|") for n in NUMBER.findall(line)} <= cells
    lines = text.partition("\n## Appendix")[0].splitlines()  # the appendix is another study's
    known = {number for line in lines if line.startswith("|") for number in NUMBER.findall(line)}
    known |= {"0.6", "2604.23747"}  # the temperature; a paper
    known |= {"40.0"}  # see test_counts_in_the_prose_of_the_page
    known |= {"1.3", "1.8", "1.9", "2.0", "2.6", "3.0", "0.4", "0.5"}  # see test_the_prose_about_fp8
    # see test_the_prose_about_hard_problems
    known |= {"39.8", "41.1", "41.0", "39.0", "38.5", "36.3", "35.8", "37.1", "34.8", "34.6"}
    known |= {"0.05", "0.001"}  # coefficients to try
    known |= {"4.0", "4.04"}  # see test_the_prose_about_the_clip and that about the newer methods
    known |= {"3.2", "6.3", "9.4", "38.2", "40.2", "50.8", "7.4", "4.6"}  # the page in short; the newer methods
    known |= {"0.2", "11.9", "5.6"}  # see test_the_prose_about_variants_of_luffy
    known |= {"0.7", "3.8", "8.7", "11.8", "1.0", "1.2", "6.8", "13.1"}  # see test_the_prose_about_generalisation
    known |= {"27.2", "11.0", "37.8", "26.4", "44.9", "28.3", "38.3", "35.0", "48.1", "44.2"}
    known |= {"54.8", "62.4", "72.4", "75.6", "61.2", "66.4"}
    known |= {
        "0.871",
        "41.6",
        "45.2",
        "42.6",
        "36.5",
        "44.0",
        "45.7",
    }  # see test_the_prose_about_luffy_and_on_policy_rl
    known |= {"3.7", "5.3", "2.3", "0.0", "4.5", "2.2", "4.7"}  # see there
    known |= {f"{0.1 * p / (p + 0.1) ** 2:.2f}" for p in (0.1, 0.9)} | {"0.1", "0.9", "0.01"}  # LUFFY's weight
    known |= {"39.9", "40.1", "40.5", "43.9", "38.9"}  # see test_the_prose_about_human_solutions
    known.add(f"{100 * (0.42 * 0.58 / 512) ** 0.5:.1f}")  # the standard error of the validation accuracy
    prose = [line for line in lines if not line.startswith("|")]
    unknown = {number for line in prose for number in NUMBER.findall(line)} - known
    assert not unknown
    caption = (ROOT / "README.md").read_text(encoding="utf-8").partition("*A real model")[2].partition("*\n")[0]
    accuracies = re.findall(r"\| (\d+\.\d) \(", figures.main_table(rows))  # one a method, the base first
    assert set(NUMBER.findall(caption)) == set(accuracies[:6]) and len(set(accuracies)) == len(accuracies) == 8


def test_a_run_that_failed_before_its_first_step_changes_nothing(figures):
    text, rows = figures.PAGE.read_text(encoding="utf-8"), figures.read()
    for seed, columns in ((1, {"step": []}), (2, {"step": [0], "val-core/accuracy": [0.25]})):
        rows.append(contest_row("luffy", 3e-6, "failed", seed=seed) | {"curves": columns | {"gpu_seconds": []}})
    assert figures.fill(text, rows) == text


def test_rows_of_the_dynamics_are_told_apart(figures):
    rows = [line.split(" | ")[:4] for line in figures.dynamics_table(figures.read()).splitlines()]
    assert rows[0] == ["| ", "rate", "seed", "10 steps"] and len(set(map(tuple, rows))) == len(rows)


def test_counts_in_the_prose_of_the_page(figures):
    by_name = {row["name"]: row for row in figures.read()}
    luffy, on_policy = by_name["luffy-lr3e-06-s0"], by_name["on_policy-lr3e-06-s0"]
    assert min(groups_left(figures, luffy)) > 32 and len(groups_left(figures, luffy)) == 200  # two updates before, too
    assert min(groups_left(figures, on_policy)) >= 2 and len(groups_left(figures, on_policy)) == 167
    screened = json.loads((figures.HERE / "results" / "screened.json").read_text())
    assert (len(screened), list(screened.values()).count(0)) == (2500, 1102)
    by_name = {name: row for name, row in by_name.items() if not row.get("note") and row.get("seed") == 0}
    again = records.read_rows([figures.HERE / "results" / "2026-11-16-c.jsonl"])["sft-lr1e-05-s0"]
    assert f"{100 * sum(figures.shares(again)) / 1319:.1f}" == "40.0"
    sft = [row for row in by_name.values() if row["method"] == "sft"]
    assert max(sft, key=lambda row: figures.last(row, figures.VALIDATION))["lr"] == 3e-6  # the earlier rule
    assert min(sft, key=lambda row: sum(figures.shares(row)))["lr"] == 3e-6
    curves = {(row["method"], row["lr"]): records.validations(row["curves"]) for row in by_name.values()}
    for method in ("luffy", "on_policy", "mixed", "sft_rl", "luffy_clip", "rl_sft_loss"):
        low, middle, high = (curves[method, lr] for lr in (1e-6, 3e-6, 1e-5))
        assert (
            middle[50] > low[50] and min(low[25], middle[25]) > high[25]
        )  # what leads after 50 steps, and loses first
        hardly = 0.015 if method in ("luffy_clip", "rl_sft_loss") else 0.0
        assert high[25] < high[0] + hardly
    again = records.read_rows([figures.HERE / "results" / "2026-11-16-c.jsonl"])["sft_rl-lr3e-06-s0"]
    assert records.validations(again["curves"])[50] < curves["sft_rl", 1e-6][50] < curves["sft_rl", 3e-6][50]  # level


def test_the_prose_about_luffy_and_on_policy_rl(figures):
    by_name = {row["name"]: row for row in figures.read()}
    luffy, on_policy = (
        [by_name[f"{name}-s{seed}"] for seed in plan.SEEDS] for name in ("luffy-lr3e-06", "on_policy-lr1e-06")
    )

    def means(runs):
        found = [records.validations(run["curves"]) for run in runs]
        return {step: 100 * statistics.mean(values[step] for values in found) for step in (25, 50, 75, 100, 125, 150)}

    ours, theirs = means(luffy), means(on_policy)
    again = records.validations(by_name["luffy-short-lr3e-06-s0"]["curves"])
    with_it = {step: (3 * ours[step] + 100 * again[step]) / 4 for step in (25, 50, 75, 100)}
    assert all(with_it[step] > theirs[step] + 4 for step in (25, 50)) and ours[150] < theirs[150] - 3
    assert all(abs(with_it[step] - theirs[step]) < 1 for step in (75, 100))  # level
    assert [f"{ours[step]:.1f}" for step in (50, 100, 150)] == ["41.6", "45.2", "42.6"]
    assert [f"{theirs[step]:.1f}" for step in (50, 100, 150)] == ["36.5", "44.0", "45.7"]
    for lr in ("1e-06", "3e-06"):  # at equal rates neither leads
        one, other = (records.validations(by_name[f"{m}-lr{lr}-s0"]["curves"]) for m in ("luffy", "on_policy"))
        assert {one[step] > other[step] for step in (25, 50, 75, 100)} == {True, False}
    own, traces = (figures.present(luffy[0], f"actor/{kind}_policy_prob")[: figures.LATE] for kind in ("on", "off"))
    assert (f"{statistics.mean(own):.3f}", f"{statistics.mean(traces):.3f}") == ("0.871", "0.897")
    at_1e6 = [by_name[f"{method}-lr1e-06-s0"] for method in ("luffy", "on_policy")]
    assert figures.difference(*([run] for run in at_1e6), figures.shares) == "-3.7 (-5.3 to -2.1)"
    at_3e6 = [by_name[f"{method}-lr3e-06-s0"] for method in ("on_policy", "mixed", "sft_rl")]
    assert [figures.difference(luffy, [run], figures.shares) for run in at_3e6] == [
        "+2.3 (+0.0 to +4.5)", "+1.2 (-2.2 to +4.7)", "-2.1 (-4.4 to +0.1)"]  # fmt: skip


def test_the_page_in_short(figures, prose, by_name):
    rows = figures.read()
    short = prose.partition("## Results")[0]
    assert f"{len(by_name) - 1} runs, three seeds" in short and "base" in by_name
    tested = figures.tested(rows)
    mean = {name: figures.accuracy(found).split()[0] for name, found in tested.items()}
    assert (
        f"The base has {mean['base']} %. With three seeds each, SFT on the traces, then RL has {mean['sft_rl']} %, "
        f"on-policy RL {mean['on_policy']} %, Mixed-Policy {mean['mixed']} %, SFT {mean['sft']} % and **LUFFY "
        f"{mean['luffy']} %**" in short
    )
    behind = {name: points_ahead(figures, tested[name], tested["luffy"]) for name in ("on_policy", "sft_rl")}
    then = behind["sft_rl"].replace(" points", "")
    assert (
        f"LUFFY is behind on-policy RL by {behind['on_policy']}, behind SFT, then RL by {then}, and level with SFT"
        in short
    )
    at_3e6 = {name: by_name[f"{name}-lr3e-06-s0"] for name in ("on_policy", "mixed", "sft_rl")}
    assert f"LUFFY is ahead of on-policy RL by {points_ahead(figures, tested['luffy'], [at_3e6['on_policy']])}" in short
    higher = [float(mean[name]) - float(figures.accuracy([run]).split()[0]) for name, run in at_3e6.items()]
    assert f"with 1e-6 these three end {min(higher):.0f} to {max(higher):.0f} points higher" in short
    hard = {name: [row for row in rows if row.get("note") == "hard" and row["method"] == name and figures.has_result(row)]
            for name in ("luffy", "on_policy")}  # fmt: skip
    luffy, on_policy = (figures.accuracy(found).split()[0] for found in hard.values())
    assert f"LUFFY has {luffy} % on the whole test and on-policy RL {on_policy} %: within the noise" in short
    runs = {
        name: found[0]
        for name in plan.METHODS
        if (found := [r for r in figures.short_runs(rows) if r["method"] == name])
    }
    score = {name: figures.accuracy([run]).split()[0] for name, run in runs.items() if "test" in run}
    steps = {name: run["curves"]["step"][-1] for name, run in runs.items()}
    assert (
        f"RL-PLUS {score['rl_plus']} %, ReLIFT {score['relift']} % ({steps['relift']} steps), ExGRPO {score['exgrpo']} %, "
        f"CHORD {score['chord']} %, SRFT {score['srft']} % ({steps['srft']} steps), HPT {score['hpt']} %. LUFFY has "
        f"{score['luffy']} % there, on-policy RL {score['on_policy']} %, and SFT, then RL at its own rate {score['sft_rl']} %"
        in short
    )
    assert {steps[name] for name in score if name not in ("relift", "srft")} == {plan.SHORT_STEPS}
    twins = [records.validations(by_name[f"luffy{note}-lr3e-06-s0"]["curves"])[100] for note in ("", "-short")]
    assert round(100 * (twins[0] - twins[1])) == 6 and "two runs of LUFFY with one seed differ by 6 points" in short
    math500 = {
        name: figures.accuracy(made["math500"]).split()[0] for name, made in figures.evaluated(rows, "suites").items()
    }
    assert (
        f"base {math500['base']} %, LUFFY {math500['luffy']} %, on-policy RL {math500['on_policy']} %, SFT, then RL "
        f"{math500['sft_rl']} % after these 100 steps; SFT {math500['sft']} %" in short
    )
    bonus = figures.accuracy([by_name["luffy-entropy0.01-lr3e-06-s0"]]).split()[0]
    assert f"at 3e-6: {bonus} % after 100 steps, {score['luffy']} % without" in short
    ahead = points_ahead(figures, tested["luffy"], [at_3e6["on_policy"]], figures.solved)
    assert f"With 3e-6 for all LUFFY is ahead of on-policy RL in pass@4 by {ahead}" in short


def test_the_prose_about_the_clip(figures, by_name):
    clip, without = (
        {lr: by_name[f"{method}-lr{lr}-s0"] for lr in ("1e-06", "3e-06")} for method in ("luffy_clip", "luffy")
    )
    at_1e6, at_3e6 = (figures.difference([clip[lr]], [without[lr]], figures.shares) for lr in clip)
    assert (at_1e6, at_3e6) == ("+2.9 (+1.5 to +4.3)", "+2.4 (+0.7 to +4.0)")
    for lr, limit in (("1e-06", 0.02), ("3e-06", 0.035)):  # twice the standard error; one sample a problem at 3e-6
        ours, theirs = (records.validations(runs[lr]["curves"]) for runs in (clip, without))
        assert all(abs(ours[step] - theirs[step]) < limit for step in range(25, 151, 25))


def test_the_prose_about_the_newer_methods(figures, prose, by_name):
    long = [by_name[f"luffy-lr3e-06-s{seed}"] for seed in plan.SEEDS]
    older = {name: by_name[f"{name}-short-lr{lr}-s0"] for name, lr in
             (("luffy", "3e-06"), ("on_policy", "3e-06"), ("sft_rl", "1e-06"))}  # fmt: skip
    luffy = older["luffy"]
    at = {
        step: [f"{100 * records.validations(run['curves'])[step]:.1f}" for run in (luffy, *long)]
        for step in (50, 75, 100)
    }
    assert f"this run of LUFFY has {at[100][0]} % in validation at step 100, where the three longer ones" in prose
    assert f"had {at[100][1]}, {at[100][2]} and {at[100][3]} %, the first of them with the same seed" in prose
    assert f"at step 75 it has {at[75][0]} %, they {at[75][1]}, {at[75][2]} and {at[75][3]} %" in prose
    assert f"of 100 steps, has {at[50][0]} % at step 50 and {at[100][0]} % at step 100" in prose
    own = [100 * statistics.mean(value for step, value in figures.points(run, "batch/on_solved") if 80 < step <= 100)
           for run in (luffy, *long)]  # fmt: skip
    assert "as often right ({:.1f} %; {:.1f}, {:.1f} and {:.1f} %)".format(*own) in prose

    assert f"is ahead of LUFFY by {points_ahead(figures, [older['sft_rl']], [luffy])}, for a fifth more" in prose
    seconds = [figures.cost(older[name], figures.read())[0] for name in ("sft_rl", "luffy")]
    assert 1.15 < seconds[0] / seconds[1] < 1.25
    fast, slow = (
        records.validations(by_name[f"{name}-s0"]["curves"]) for name in ("sft_rl-lr3e-06", "sft_rl-short-lr1e-06")
    )
    assert (
        f"{100 * fast[50]:.1f} % in validation at step 50 and {100 * fast[100]:.1f} % at step 100, against "
        f"{100 * slow[100]:.1f} % at 1e-6" in prose
    )
    tries = points_ahead(figures, [luffy], [older["on_policy"]], figures.solved)
    assert f"in four tries less than LUFFY, by {tries}" in prose
    (cut,) = [row for row in records.read_lines(figures.HERE / "results" / "2026-11-16-e.jsonl")
              if row["name"] == "on_policy-lr1e-06-s1"]  # fmt: skip
    assert f"cut off at step {cut['curves']['step'][-1]} has {figures.accuracy([cut]).split()[0]} %" in prose

    newer = {name: by_name[f"{name}-short-lr3e-06-s0"] for name in plan.NEWER}
    best = sorted(newer, key=lambda name: -sum(figures.shares(newer[name])))
    assert best == ["rl_plus", "relift", "exgrpo", "chord", "srft", "hpt"]
    less = [figures.difference([newer[name]], [luffy], figures.shares) for name in best]
    ahead = [points.split()[0][1:] for points in less[:3]]
    assert "They are ahead of this run of LUFFY by {}, {} and {} points".format(*ahead) in prose
    final = [re.sub(r"[()]", "", re.sub(r" \(", ", ", figures.difference([newer[name]], long, figures.shares)))
             for name in best[:3]]  # fmt: skip
    assert f"up to 200 steps: {'; '.join(final)})" in prose
    assert max(newer, key=lambda name: figures.last(newer[name], figures.VALIDATION)) == "rl_plus"
    assert all("(-" in points and "to +" in points for points in less[3:5])  # CHORD and SRFT
    _, behind, low, high = re.match(r"(-)(\S+) \(-(\S+) to -(\S+)\)", less[5]).groups()
    assert f"**HPT** is behind it by {behind} points ({high} to {low})" in prose
    assert f"{statistics.mean(figures.present(newer['chord'], 'actor/grad_norm')[: figures.LATE]):.3g}" == "4.04"
    steps = {name: run["curves"]["step"][-1] for name, run in newer.items() if run["status"] == "cut"}
    assert steps == {"srft": 97, "relift": 87} and "SRFT was cut off at step 97 and ReLIFT at step 87" in prose


def test_the_prose_about_variants_of_luffy(figures, prose, by_name):
    plain, bonus, recorded = (by_name[f"luffy-{note}-lr3e-06-s0"] for note in ("short", "entropy0.01", "recorded"))
    accuracy, tries = (figures.difference([recorded], [plain], score) for score in (figures.shares, figures.solved))
    assert (accuracy, tries) == ("-0.1 (-1.8 to +1.6)", "-2.9 (-5.6 to -0.2)")
    assert "(-0.1 points, -1.8 to +1.6), and in four tries behind by 2.9 (0.2 to 5.6)" in prose
    assert recorded["status"] == "cut" and f"cut off at step {recorded['curves']['step'][-1]}) is level" in prose
    entropy = dict(figures.points(bonus, "actor/entropy_loss"))
    assert min(value for step, value in entropy.items() if step >= 15) > 10 > entropy[14]
    late = [
        statistics.mean(value for step, value in figures.points(bonus, metric) if step >= 17)
        for metric in ("batch/on_solved", "response_length/clip_ratio")
    ]
    assert "from step 15 on the entropy is above 10 nats" in prose
    assert (
        f"(all tokens alike would be {math.log(151_936):.1f}), from step 17 on {100 * late[0]:.1f} % of the own samples are "
        f"right, and {100 * late[1]:.0f} % run to the limit" in prose
    )  # the vocabulary of Qwen2.5
    found = {step: f"{100 * value:.1f}" for step, value in records.validations(bonus["curves"]).items()}
    assert min(found.values()) == found[25] and max(found.values()) == found[100]
    assert f"validation falls to {found[25]} % at step 25 and rises to {found[100]} % at step 100" in prose


def test_the_prose_about_generalisation(figures, prose):
    suites, temperatures = (figures.evaluated(figures.read(), key) for key in ("suites", "temperatures"))

    def ahead(made, one, other, name, score=None):
        return points_ahead(figures, made[one][name], made[other][name], score)

    then = ahead(suites, "sft_rl", "on_policy", "math500").replace(" points", "")
    assert (
        f"ahead of LUFFY by {ahead(suites, 'on_policy', 'luffy', 'math500')}, SFT, then RL of on-policy RL by {then}"
        in prose
    )
    luffy, sft, sft_rl = (ahead(suites, "on_policy", other, "arc_c") for other in ("luffy", "sft", "sft_rl"))
    sft, sft_rl = (points.replace(" points", "") for points in (sft, sft_rl))
    assert f"ahead of LUFFY by {luffy}, of SFT by {sft} and of SFT, then RL by {sft_rl}" in prose
    trained = ("luffy", "on_policy", "sft", "sft_rl")
    for name, (one, other) in product(("amc", "minerva", "olympiad"), combinations(trained, 2)):
        low, high = re.search(r"\((\S+) to (\S+)\)", ahead(suites, one, other, name)).groups()
        assert float(low) <= 0 <= float(high)

    def scores(score):
        return {
            method: {t: f"{figures.interval([score(run) for run in runs])[0]:.1f}" for t, runs in made.items()}
            for method, made in temperatures.items()
        }

    right, solved = scores(figures.shares), scores(figures.solved)
    fall = {method: f"from {found['0.2']} to {found['1.2']} %" for method, found in right.items()}
    assert f"the base falls {fall['base']} of right samples, LUFFY {fall['luffy']} and SFT {fall['sft']};" in prose
    assert f"on-policy RL falls {fall['on_policy']} and SFT, then RL {fall['sft_rl']}." in prose
    assert f"At 1.2 on-policy RL is ahead of LUFFY by {ahead(temperatures, 'on_policy', 'luffy', '1.2')}" in prose
    best = {method: max(found, key=lambda t: float(found[t])) for method, found in solved.items()}
    assert best == {"base": "0.6", "luffy": "0.6", "sft": "1", "sft_rl": "1", "on_policy": "1.2"}
    assert (
        f"do best at 0.6 ({solved['base']['0.6']} and {solved['luffy']['0.6']} %), SFT and SFT, then RL at 1.0 "
        f"({solved['sft']['1']} and {solved['sft_rl']['1']} %), on-policy RL at 1.2 ({solved['on_policy']['1.2']} %)"
        in prose
    )
    behind = ahead(temperatures, "on_policy", "luffy", "1.2", figures.solved)
    assert f"at 1.2 LUFFY is behind by {behind}" in prose
    level = [ahead(temperatures, "luffy", "on_policy", t, figures.solved) for t in ("0.2", "0.6", "1")]
    assert all(re.search(r"\(-\S+ to \d", points) for points in level)
    leads = [float(ahead(temperatures, "sft", "luffy", t, figures.solved).split()[0]) for t in right["sft"]]
    assert f"by {min(leads):.0f} to {max(leads):.0f} points at all four" in prose
    assert f"it rises from {solved['sft']['0.2']} to {solved['sft']['1']} %" in prose


def test_the_prose_about_hard_problems(figures):
    by_name = {row["name"]: row for row in figures.read()}
    runs = {seed: by_name[f"on_policy-hard-lr1e-06-s{seed}"] for seed in (0, 1)}
    left = [count / figures.PROBLEMS for run in runs.values() for count in groups_left(figures, run)]
    first, last = ([*left[start:][:10], *left[start + 100 :][:10]] for start in (0, 90))
    assert len(left) == 200 and 0.25 < statistics.mean(first) < 0.27 and round(100 * statistics.mean(last)) == 44
    shown = [*(by_name[f"luffy-hard-lr3e-06-s{seed}"] for seed in (0, 1, 2)), *runs.values()]
    ends = [100 * figures.last(run, figures.VALIDATION) for run in shown]
    assert [f"{value:.1f}" for value in ends] == ["39.8", "41.1", "41.0", "39.0", "38.5"]
    assert [figures.accuracy([run]).split()[0] for run in shown] == ["36.3", "35.8", "37.1", "34.8", "34.6"]
    seconds = [figures.last(by_name[name], "gpu_seconds") for name in ("sft-hard-lr1e-05-s0", "luffy-hard-lr3e-06-s0")]
    assert 5 < seconds[1] / seconds[0] < 6.5


def test_the_prose_about_human_solutions(figures):
    human = {row["name"]: row for row in figures.read()}["luffy-human-lr3e-06-s0"]
    cut, right, foreign = (
        dict(figures.points(human, name))
        for name in ("response_length/clip_ratio", "batch/on_solved", "actor/off_policy_prob")
    )

    def mean(found, steps):
        return statistics.mean(found[step] for step in steps)

    assert 0.85 < mean(cut, range(71, 111)) < 0.95 and mean(cut, range(61, 71)) < 0.1 and cut[150] < 0.5
    assert abs(mean(right, range(71, 111)) - mean(right, range(31, 71))) < 0.03
    assert abs(mean(foreign, range(141, 151)) - mean(foreign, range(1, 11))) < 0.01
    found = [f"{100 * value:.1f}" for value in records.validations(human["curves"]).values()]
    assert found == ["28.1", "39.9", "40.1", "40.5", "43.9", "38.9"]


def test_the_prose_about_fp8(figures):
    by_name = {row["name"]: row for row in figures.read()}
    cut = [records.read_rows([figures.HERE / "results" / f"2026-11-{part}.jsonl"]) for part in ("16-e", "17")]
    names = {kind: f"on_policy-{kind}lr1e-06-s{{}}" for kind in ("", "bf16-", "fp8-")}

    def apart(one, other):
        """Points of own samples right, problem by problem the same ones: the mean over the steps, its standard error."""
        ones, others = (dict(figures.points(row, "batch/on_solved")) for row in (one, other))
        found = [100 * (ones[step] - others[step]) for step in range(51, 76) if step in ones and step in others]
        return f"{statistics.mean(found):+.1f}", f"{statistics.stdev(found) / len(found) ** 0.5:.1f}"

    plain = {seed: [by_name[names[kind].format(seed)] for kind in ("", "bf16-")] for seed in (0, 1)}
    plain[1] += [rows[names[""].format(1)] for rows in cut]
    plain[0].append(records.read_rows([figures.HERE / "results" / "2026-11-16-b.jsonl"])[names[""].format(0)])
    assert plain[0][-1]["curves"]["step"][-1] == 101
    assert [row["curves"]["step"][-1] for row in plain[1]] == [200, 75, 97, 74]
    behind = {seed: [apart(row, by_name[names["fp8-"].format(seed)]) for row in rows] for seed, rows in plain.items()}
    assert [sorted(points for points, _ in found) for found in behind.values()] == [
        ["+1.3", "+1.9", "+2.6"], ["+1.8", "+1.9", "+2.0", "+3.0"]]  # fmt: skip
    assert {error for found in behind.values() for _, error in found} == {"0.4", "0.5"}
    between = [apart(*two) for rows in plain.values() for two in combinations(rows, 2)]
    assert max(abs(float(points)) for points, _ in between) == 1.3


def test_the_run_that_was_replaced(figures):
    first, again = (
        [row for row in records.read_lines(figures.HERE / "results" / name) if row["name"] == "on_policy-lr3e-06-s0"]
        for name in ("2026-11-16.jsonl", "2026-11-16-b.jsonl")
    )
    old, (second, _) = first[0], again
    left = groups_left(figures, old)
    assert (sum(count <= 32 for count in left), len(left)) == (68, 165)
    cut = dict(figures.points(old, "response_length/clip_ratio"))
    assert max(cut[step] for step in range(101, 111)) < 0.08 and min(cut[step] for step in range(156, 166)) > 0.6
    assert round(old["test"]["truncated"], 2) == 0.76 and 33 <= 100 * sum(figures.shares(old)) / 1319 < 34
    assert "test" not in second and second["curves"]["step"][-1] == 156
    assert max(figures.present(second, "response_length/clip_ratio")) < 0.1


def groups_left(figures, row):
    idle = [figures.present(row, f"batch/solve_{x}") for x in ("none", "all")]
    return [figures.PROBLEMS - a - b for a, b in zip(*idle, strict=True)]


def test_intervals_over_problems_and_seeds(figures):
    middle, half = figures.interval([[0.0, 1.0] * 50])
    assert middle == 50.0 and half == pytest.approx(100 * 1.96 * 0.5025 / 10, rel=1e-3)
    middle, wider = figures.interval([[0.0, 1.0] * 50, [0.0, 1.0] * 50, [0.2, 1.0] * 50])
    assert middle == pytest.approx(53.33, abs=0.01) and wider > 4.303 * 5.77 / 3**0.5
    row = {"seed": 0, "test": {"k": 4, "right": "0124"}}
    other = {"seed": 0, "test": {"k": 4, "right": "0004"}}
    assert figures.shares(row) == [0.0, 0.25, 0.5, 1.0] and figures.solved(row) == [0.0, 1.0, 1.0, 1.0]
    paired = figures.difference([row], [other], figures.shares)
    again = {"seed": 1, "test": {"k": 4, "right": "0044"}}  # with other seeds: the means over the seeds of each
    assert figures.difference([row], [other, again], figures.shares).startswith("+6.2 (")
    assert figures.difference([row], [again], figures.shares).startswith("-6.2 (")
    other["test"]["in_order"] = False
    apart = figures.difference([row], [other], figures.shares)
    assert paired == "+18.8 (-4.7 to +42.2)" and apart == "+18.8 (-45.7 to +83.2)"


def test_generalisation_is_a_section_once_there_are_data(figures):
    rows = [contest_row("luffy", lr, "finished", a, step=200) for lr, a in ((3e-6, 0.9), (1e-6, 0.8), (1e-5, 0.1))]
    rows.append({"name": "base", "method": "base", "status": "finished", "curves": {}})
    for found in rows:
        found["test"] = {"k": 4, "right": "0404"}
    assert figures.generalisation(rows) == ""
    for found, right in ((rows[0], "2442"), (rows[3], "0112")):
        arc = {"k": 4, "right": "1111"}
        found["suites"] = {"math500": {"k": 4, "right": right}, "aime24": {"k": 4, "right": "0000"}, "arc_c": arc}
    assert figures.generalisation(rows).splitlines() == [
        "## Generalisation",
        "",
        "4 samples a problem at temperature 0.6. Within the noise of chance for all models: AIME24, ARC-c.",
        "",
        "|  | learning rate | steps | MATH-500, % |",
        "|---|---|---|---|",
        "| the base |  |  | 25.0 (5.0 to 45.0) |",
        "| LUFFY | 3e-06 | 200 | 75.0 (46.7 to 103.3) |",
    ]
    short = contest_row("luffy", 3e-6, "finished", note="short", step=100) | {
        "steps": 100,
        "suites": rows[0].pop("suites"),
    }
    short["test"] = rows[0]["test"]
    assert figures.generalisation([*rows, short]).splitlines()[-1] == "| LUFFY | 3e-06 | 100 | 75.0 (46.7 to 103.3) |"
    newer = short | {"method": "hpt"}
    assert (
        figures.generalisation([*rows, short, newer]).splitlines()[-1] == "| HPT | 3e-06 | 100 | 75.0 (46.7 to 103.3) |"
    )
    rows[0]["suites"] = short["suites"]
    rows[0]["temperatures"] = {"0.6": {"k": 8, "right": "0880"}, "1": {"k": 8, "right": "1240"}}
    assert figures.generalisation(rows).endswith("(../../docs/images/qwen-temperature.png)")


def test_hard_problems_are_a_section_once_there_are_data(figures):
    base = {"name": "base", "method": "base", "status": "finished", "curves": {}, "test": {"k": 4, "right": "0040"}}
    assert figures.hard_problems([base]) == ""
    run = contest_row("luffy", 3e-6, "finished", note="hard", step=200) | {"test": {"k": 4, "right": "1342"}}
    run["curves"] = {"step": list(range(1, 201)), "batch/on_solved": [0.1] * 100 + [0.3] * 100}
    sft = contest_row("sft", 1e-5, "finished", note="hard", step=200) | {"test": {"k": 4, "right": "1302"}}
    for found in (run, sft):
        found["curves"]["gpu_seconds"] = [7.0]
    assert figures.hard_problems([base, run, sft]).splitlines()[-6:] == [
        "| LUFFY | 3e-06 | 1 | 200 | 10 | 30 | 62.5 (30.9 to 94.1) | 100.0 | 50.0 (21.7 to 78.3) | 7 |",
        "| SFT | 1e-05 | 1 | 200 |  |  | 37.5 (5.9 to 69.1) | 75.0 | 50.0 (21.7 to 78.3) | 7 |",
        "",
        "|  | difference in test accuracy, points | in pass@4 |",
        "|---|---|---|",
        "| LUFFY less SFT | +25.0 (-24.0 to +74.0) | +25.0 (-24.0 to +74.0) |",
    ]


def test_what_is_changed_in_luffy_stands_below_luffy_itself(figures):
    plain = [contest_row("luffy", lr, "finished", step=200) for lr in (1e-6, 3e-6)]
    assert figures.variants(plain) == ""
    human, cut = (
        contest_row("luffy", 3e-6, "cut", note=note, step=step) for note, step in (("human", 150), ("entropy0.01", 10))
    )
    hard = contest_row("luffy", 3e-6, "finished", note="hard", step=200)
    for found, right in zip((*plain, human, cut, hard), ("0000", "0440", "0004", "4444", "4444"), strict=True):
        found["test"] = {"k": 4, "right": right, "truncated": 0.25}
        found["curves"] |= {"actor/entropy_loss": [None, 0.2], "actor/off_policy_prob": [None, 0.7]}
    assert figures.variants([*plain, human, cut, hard]).splitlines()[-2:] == [
        "| as it is | 200 | 50.0 (-6.6 to 106.6) | 50.0 | 25.0 | 0.7 | 0.2 |",
        "| human solutions as traces | 150 | 25.0 (-24.0 to 74.0) | 25.0 | 25.0 | 0.7 | 0.2 |",
    ]


def test_a_short_variant_stands_beside_the_short_run(figures):
    runs = [
        contest_row("luffy", 3e-6, "finished", note=note, step=100) | {"steps": 100}
        for note in ("entropy0.01", "short")
    ]
    runs.append(contest_row("luffy", 3e-6, "finished", step=200))
    for run in runs:
        run["test"] = {"k": 4, "right": "0440", "truncated": 0.25}
    titles = [line.split(" | ")[:2] for line in figures.variants(runs).splitlines()[4:]]
    assert titles == [["| as it is", "100"], ["| entropy bonus 0.01", "100"]]


def test_newer_methods_stand_beside_as_many_steps_of_the_older_ones(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "IMAGES", tmp_path)

    def run(method, lr, steps, note, seed=0):
        found = contest_row(method, lr, "finished", note=note, step=steps[-1], seed=seed) | {"steps": steps[-1]}
        found["curves"] = {"step": [0, *steps], figures.VALIDATION: [0.25, *(step / 1000 for step in steps)],
                           "gpu_seconds": [0.0, *steps], "perf/update_tokens": [0, *([1_000_000] * len(steps))],
                           "batch/on_solved": [None, *([0.5] * len(steps))]}  # fmt: skip
        for metric in ("actor/entropy_loss", "actor/grad_norm"):
            found["curves"][metric] = [None, *([0.125] * len(steps))]
        return found | {"test": {"k": 4, "right": "0440", "tokens": 9, "truncated": 0.25}}

    older = [run("luffy", 3e-6, (50, 100, 200), ""), run("on_policy", 1e-6, (50, 100), ""),
             run("mixed", 3e-6, (50, 100), "", seed=1), run("sft", 3e-6, (50, 100), "")]  # fmt: skip
    assert figures.newer_methods(older) == ""
    figures.newer_figure(older)
    assert not list(tmp_path.iterdir())
    rows = [*older, run("hpt", 3e-6, (50, 100), "short")]
    late = "50 | 0.125 | 0.125 | 100 | 2.0 |"
    assert figures.newer_methods(rows).splitlines()[-2:] == [
        f"| LUFFY | 3e-06 | 100 |  |  |  | 5.0 | 10.0 | {late}",
        f"| HPT | 3e-06 | 100 | 50.0 (-6.6 to 106.6) | 50.0 |  | 5.0 | 10.0 | {late}",
    ]
    rows += [run("luffy", 3e-6, (50, 100), "short"), run("mixed", 1e-6, (50, 100), "short")]
    rows[-1]["test"]["right"] = "0220"
    assert figures.newer_methods(rows).splitlines()[-3:-1] == [
        f"| LUFFY | 3e-06 | 100 | 50.0 (-6.6 to 106.6) | 50.0 |  | 5.0 | 10.0 | {late}",
        f"| Mixed-Policy | 1e-06 | 100 | 25.0 (-3.3 to 53.3) | 50.0 | -25.0 (-53.3 to +3.3) | 5.0 | 10.0 | {late}",
    ]
    figures.newer_figure(rows)
    assert [path.name for path in tmp_path.iterdir()] == ["qwen-newer.png"]


def test_fp8_stands_beside_the_run_with_its_seed_over_as_many_steps(figures):
    plain = [contest_row("on_policy", 1e-6, "finished", seed=seed, step=200) for seed in (0, 1)]
    assert figures.fp8_rollouts(plain) == ""
    quantized = contest_row("on_policy", 1e-6, "finished", note="fp8", seed=1, step=50)
    for found, last, right in ((plain[0], 200, 0.9), (plain[1], 200, 0.4), (quantized, 50, 0.3)):
        scores = [0.5 if step in (25, 50) else 0.7 if step == 200 else None for step in range(1, last + 1)]
        solved = [right if step > 25 else 0.1 for step in range(1, last + 1)]
        found["curves"] = {"step": list(range(1, last + 1)), figures.VALIDATION: scores, "batch/on_solved": solved}
    quantized["curves"]["rollout/ess"] = [0.98] * 50
    quantized |= {"steps": 50, "test": {"k": 4, "right": "0440"}}
    assert figures.fp8_rollouts([*plain, quantized]).splitlines()[-2:] == [
        "| bfloat16 | 1 | 50.0 | 50.0 |  | 40 |  |  |  |  |",
        "| fp8 | 1 | 50.0 | 50.0 | 50.0 (-6.6 to 106.6) | 30 |  |  |  | 0.98 |",
    ]
    short = {**quantized, "note": "bf16", "test": {"k": 4, "right": "0000"}}
    lines = figures.fp8_rollouts([*plain, quantized, short]).splitlines()
    assert lines[-6] == "| bfloat16 | 1 | 50.0 | 50.0 | 0.0 (0.0 to 0.0) | 30 |  |  |  | 0.98 |"
    assert lines[-1] == "| fp8 less bfloat16 | +50.0 (-6.6 to +106.6) |"


def test_the_figure_of_accuracy_has_the_means_of_seeds_as_far_as_all_got(figures, monkeypatch):
    runs = [contest_row("luffy", 3e-6, "finished", seed=seed, step=200) for seed in (0, 1)]
    steps = {0: ([0, 100, 200], [0.2, 0.4, 0.5]), 1: ([0, 100], [0.4, 0.5])}
    for run in runs:
        shown, accuracies = steps[run["seed"]]
        run["curves"] = {"step": shown, figures.VALIDATION: accuracies, "gpu_seconds": [10.0 * (1 + run["seed"])] * 3,
                         "perf/update_tokens": [None, *[1e6] * (len(shown) - 1)]}  # fmt: skip
        run["test"] = {"k": 4, "right": "04"}
    runs[1]["steps"] = 100
    unseen = contest_row("luffy", 1e-5, "failed", step=3) | {"curves": {"step": [3], "gpu_seconds": [1.0]}}
    unseen["curves"]["perf/update_tokens"] = [1e6]
    drawn = {}
    monkeypatch.setattr(figures, "save", lambda figure, name: drawn.update({name: figure}))
    figures.accuracy_figure([*runs, unseen])
    thick = [[line for line in ax.lines if line.get_lw() > 1] for ax in drawn["accuracy"].axes]
    assert [[line.get_xydata().tolist() for line in lines] for lines in thick] == [
        [[[0, 30], [100, 45]]], [[[15, 30], [15, 45]]], [[[0, 30], [1, 45]]]]  # fmt: skip


def test_the_figure_of_hard_problems(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    rows = [found for found in figures.read() if found.get("note") != "hard"]
    figures.hard_figure(rows)
    assert not list(tmp_path.iterdir())
    figures.hard_figure([found | {"note": "hard"} for found in figures.trained(rows)[:2]])
    assert [path.name for path in tmp_path.iterdir()] == ["qwen-hard.png"]


def test_the_figure_of_temperatures(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    rows = [{key: value for key, value in found.items() if key != "temperatures"} for found in figures.read()]
    figures.temperature_figure(rows)
    assert not list(tmp_path.iterdir())
    for found in figures.tested(rows)["luffy"]:
        found["temperatures"] = {"0.6": {"k": 8, "right": "0880"}, "1": {"k": 8, "right": "1240"}}
    figures.temperature_figure(rows)
    assert [path.name for path in tmp_path.iterdir()] == ["qwen-temperature.png"]


STAND_IN = """
import json, pathlib, signal, sys, time, yaml
command, what, *rest = sys.argv[1:]
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
if command == "eval":
    options = dict(zip(rest[::2], rest[1::2]))
    out = pathlib.Path(options["--out"]); out.mkdir(parents=True, exist_ok=True)
    assert (pathlib.Path(what) / "weights").exists()
    if FAILS in str(out):
        (out / "tried").open("a").write("x"); sys.exit(1)
    suite = pathlib.Path(options["--suite"]); k = int(options["--k"])
    assert (suite.suffix != "") == ("--reward" in options) != ("--data" in options)
    names = {"math6": ["math500", "aime24"], "ood": ["arc_c"]}.get(suite.name, [suite.stem])
    rows = [{"benchmark": b, "id": f"{b}:{i}", "sample": s, "score": float(i == 0), "tokens": 10, "finish": "stop"}
            for b in names for i in (1, 0) for s in range(k)]
    (out / "items.jsonl").write_text("".join(json.dumps(r) + chr(10) for r in rows)); (out / "result.json").write_text("{}")
    sys.exit(0)
cfg = yaml.safe_load(open(what)); folder = pathlib.Path(cfg["out"]) / cfg["name"]
if FAILS in str(folder):
    (folder / "tried").open("a").write("x"); sys.exit(1)
assert (pathlib.Path(cfg["model"]["path"]) / "weights").exists()
def save(step):
    model = folder / "checkpoints" / f"step-{step}" / "model"; model.mkdir(parents=True)
    (model / "weights").write_text(str(step)); (folder / "checkpoints" / "latest").symlink_to(f"step-{step}")
with open(folder / "metrics.jsonl", "a") as file:
    for step in range(0, cfg["train"]["steps"] + 1, 25):
        accuracy = {1e-6: 0.1, 3e-6: 0.3, 1e-5: 0.2, 3e-5: 0.1}[cfg["optim"]["lr"]] + step / 1000
        file.write(json.dumps({"step": step, "time": time.time(), "val-core/accuracy": accuracy}) + chr(10)); file.flush()
        if command == "train" and (cfg["optim"]["lr"], step) == (1e-6, 25):
            try:
                time.sleep(100)
            except KeyboardInterrupt:  # the driver ends it
                save(step); sys.exit(130)
        time.sleep(SLEEP)
        if stopped:
            save(step); sys.exit(1)
save(cfg["train"]["steps"])
"""


def drive(tmp_path, sleep, *more, fails="nothing"):
    """The driver with a stand-in for ``luffy`` that learns faster at 3e-6. What has ``fails`` in the path of its folder
    fails. Never are there more processes than the memory of a GPU holds."""
    script = tmp_path / "luffy.py"
    script.write_text(textwrap.dedent(STAND_IN).replace("SLEEP", str(sleep)).replace("FAILS", repr(fails)))
    for name in ("data", "model"):
        (tmp_path / name).mkdir(exist_ok=True)
    for path in ("data/train.parquet", "data/test.jsonl", "model/weights"):
        (tmp_path / path).touch()
    arguments = ["--model", tmp_path / "model", "--data", tmp_path / "data", "--out", tmp_path / "runs", "--collect",
                 tmp_path / "collected", "--luffy", f"{sys.executable} {script}", "--poll-s", "0.05", "--minutes", 10,
                 *more]  # fmt: skip
    driver.main([str(argument) for argument in arguments])
    held = 0
    for line in records.read_lines(tmp_path / "collected" / "jobs.jsonl"):
        held += (1 if " " in line["job"] else 2) * (1 if line["what"] == "started" else -1)
        assert held <= 2 * 3 + 1
    return records.read_rows([tmp_path / "collected" / "runs.jsonl"])


def write_lines(path, rows):
    write_rows(path, rows)
    return path


def sft_is_decided(tmp_path):
    """Known rows: SFT's contest, which 1e-5 won, and the base."""
    sft = [contest_row("sft", lr, "finished", a) for lr, a in ((3e-6, 0.1), (1e-5, 0.9), (3e-5, 0.8))]
    base = {"name": "base", "method": "base", "status": "finished", "curves": {}, "test": {"k": 4, "right": "40"}}
    return write_lines(tmp_path / "known.jsonl", [*sft, base])


def test_a_contest_ends_with_the_best_rate_and_a_second_call_adds_seeds(tmp_path):
    more = ("--runs", "luffy-lr*")
    rows = drive(tmp_path, 0.0, *more)
    tuned = {
        name: (found["status"], found.get("step"))
        for name, found in rows.items()
        if name.endswith("s0") and "clip" not in name
    }
    assert tuned == {
        "luffy-lr3e-06-s0": ("finished", None),
        "luffy-lr1e-05-s0": ("finished", None),
        "luffy-lr1e-06-s0": ("dropped", 25),
    }
    assert {name for name, found in rows.items() if found["status"] == "finished"} == {
        "base", "luffy-lr1e-05-s0", "luffy-lr3e-06-s0", "luffy-lr3e-06-s1", "luffy-lr3e-06-s2"}  # fmt: skip
    assert (
        rows["luffy-lr3e-06-s1"]["test"]
        == rows["base"]["test"]
        == {"k": 4, "right": "40", "tokens": 10.0, "truncated": 0.0}
    )
    assert "test" in rows["luffy-lr1e-05-s0"] and "test" not in rows["luffy-lr1e-06-s0"]
    before = (tmp_path / "collected" / "jobs.jsonl").read_text()
    assert drive(tmp_path, 0.0, *more) == rows
    assert (tmp_path / "collected" / "jobs.jsonl").read_text() == before


def test_at_the_end_of_its_time_a_run_is_saved_and_tested(tmp_path, monkeypatch):
    begun = tmp_path / "runs" / "luffy-lr3e-06-s0" / "metrics.jsonl"
    monkeypatch.setattr(driver.Driver, "_is_late", lambda self: begun.exists() and begun.read_text() != "")
    lost = [contest_row("luffy", 1e-6, "dropped", 0.1, step=25), contest_row("luffy", 1e-5, "finished", 0.2, step=25)]
    known = write_lines(tmp_path / "known.jsonl", [*lost, contest_row("luffy", 3e-6, "cut", 0.3, step=25)])
    rows = drive(tmp_path, 0.5, "--runs", "luffy-lr*", "--known", known)
    (cut,) = [found for found in rows.values() if found["method"] == "luffy"]
    assert cut["name"] == "luffy-lr3e-06-s0" and cut["status"] == "cut" and "test" in cut
    assert os.path.exists(tmp_path / "runs" / cut["name"] / "checkpoints" / "latest")


def test_a_model_of_another_machine_is_trained_again_for_its_runs(tmp_path):
    rows = drive(tmp_path, 0.0, "--runs", "sft_rl-lr*-s0", "--known", sft_is_decided(tmp_path))
    assert {name: found["status"] for name, found in rows.items()} == {
        "sft-lr1e-05-s0": "finished", "sft_rl-lr3e-06-s0": "finished", "sft_rl-lr1e-06-s0": "dropped",
        "sft_rl-lr1e-05-s0": "finished"}  # fmt: skip
    assert "test" in rows["sft_rl-lr3e-06-s0"] and "test" not in rows["sft-lr1e-05-s0"]  # it was tested there


def test_named_models_are_evaluated_for_generalisation_and_the_base_once(tmp_path):
    more = ("--runs", "sft-lr1e-05-s[12]", "--suites", "base", "*-s2", "--known", sft_is_decided(tmp_path))
    rows = drive(tmp_path, 0.0, *more)
    assert rows.keys() == {"base", "sft-lr1e-05-s1", "sft-lr1e-05-s2"}
    one = {"k": 4, "right": "40", "tokens": 10.0, "truncated": 0.0}
    assert "suites" not in rows["sft-lr1e-05-s1"] and "test" in rows["sft-lr1e-05-s2"] and "test" not in rows["base"]
    for name in ("base", "sft-lr1e-05-s2"):
        assert rows[name]["suites"] == {"math500": one, "aime24": one, "arc_c": one}
        eight = {**one, "k": 8, "right": "80"}
        assert rows[name]["temperatures"] == {"0.2": eight, "0.6": eight, "1": eight, "1.2": eight}
    both = records.read_rows([tmp_path / "known.jsonl", tmp_path / "collected" / "runs.jsonl"])
    assert both["base"]["test"] == {"k": 4, "right": "40"} and "suites" in both["base"]


def test_an_evaluation_that_fails_is_tried_once_more_and_again_by_the_next_call(tmp_path):
    more = ("--runs", "sft-lr1e-05-s1", "--known", sft_is_decided(tmp_path))
    rows = drive(tmp_path, 0.0, *more, fails="sft-lr1e-05-s1/evaluations/test")
    assert rows["sft-lr1e-05-s1"]["status"] == "finished" and "test" not in rows["sft-lr1e-05-s1"]
    assert (tmp_path / "runs/sft-lr1e-05-s1/evaluations/test/tried").read_text() == "xx"
    assert drive(tmp_path, 0.0, *more)["sft-lr1e-05-s1"]["test"]["right"] == "40"


def test_a_training_that_fails_is_tried_once_more(tmp_path):
    more = ("--runs", "sft-lr1e-05-s1", "--known", sft_is_decided(tmp_path))
    rows = drive(tmp_path, 0.0, *more, fails="sft-lr1e-05-s1")
    assert rows["sft-lr1e-05-s1"]["status"] == "failed"
    assert (tmp_path / "runs" / "sft-lr1e-05-s1" / "tried").read_text() == "xx"


def test_screening_leads_to_the_runs_on_hard_problems_in_one_call(tmp_path):
    (tmp_path / "data").mkdir()
    problems = [{"id": f"train:{i}", "prompt": f"p{i}", "traces": []} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(problems), tmp_path / "data" / "train.parquet")
    more = ("--runs", "sft-hard-*", "--known", sft_is_decided(tmp_path))
    assert drive(tmp_path, 0.0, *more) == {}  # nothing was screened
    rows = drive(tmp_path, 0.0, *more, "--screen", 2, "--suites", "base")
    assert "suites" in rows.pop("base")
    assert {name: found["status"] for name, found in rows.items()} == {
        f"sft-hard-lr1e-05-s{seed}": "finished" for seed in plan.SEEDS}  # fmt: skip
    assert pq.read_table(tmp_path / "data" / "train-hard.parquet")["id"].to_pylist() == ["train:1"]
    assert json.loads((tmp_path / "collected" / "screened.json").read_text()) == {"train:1": 0, "train:0": 8}
    log = (tmp_path / "collected" / "jobs.jsonl").read_text()
    drive(tmp_path, 0.0, *more, "--screen", 2)
    assert (tmp_path / "collected" / "jobs.jsonl").read_text() == log


def luffy_is_decided(tmp_path):
    luffy = [contest_row("luffy", lr, "finished", a, step=200) for lr, a in ((3e-6, 0.9), (1e-6, 0.8), (1e-5, 0.1))]
    base = {"name": "base", "method": "base", "status": "finished", "curves": {}, "test": {}}
    return write_lines(tmp_path / "known.jsonl", [*luffy, base])


def test_distillation_is_left_out_with_a_word_where_there_is_no_teacher(tmp_path, capsys):
    more = ("--runs", "opd-*", "--known", luffy_is_decided(tmp_path), "--teacher", tmp_path / "1.5b")
    assert drive(tmp_path, 0.0, *more) == {}
    assert f"left out: opd-short-lr3e-06-s0, which needs {tmp_path / '1.5b'}" in capsys.readouterr().out
    (tmp_path / "1.5b").mkdir()
    assert drive(tmp_path, 0.0, *more)["opd-short-lr3e-06-s0"]["status"] == "finished"
    recipe = yaml.safe_load((tmp_path / "runs" / "opd-short-lr3e-06-s0" / "recipe.yaml").read_text())
    assert recipe["teacher"] == {"path": str(tmp_path / "1.5b")}


def test_no_run_is_begun_that_cannot_end_in_time(tmp_path, monkeypatch):
    monkeypatch.setitem(driver.STEP_S, "rl", 29.0)  # a run takes 5,800 s
    more = ("--runs", "luffy-lr*-s[12]", "--known", luffy_is_decided(tmp_path), "--whole")
    assert drive(tmp_path, 0.0, *more, "--minutes", 98) == {}
    assert len(drive(tmp_path, 0.0, *more, "--minutes", 100)) == 2
    ends = records.read_lines(tmp_path / "runs" / "luffy-lr3e-06-s1" / "metrics.jsonl")[-1]
    jobs = records.read_lines(tmp_path / "collected" / "jobs.jsonl")
    (begins,) = [job for job in jobs if (job["job"], job["what"]) == ("luffy-lr3e-06-s2", "started")]
    assert ends["step"] == 200 and begins["time"] >= round(ends["time"], 1)  # the first one was nearly done


def test_a_contest_needs_time_for_those_that_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(driver.STEP_S, "rl", 14.0)  # a run takes 2,800 s
    more = ("--runs", "luffy-lr*-s0", "--whole", "--minutes")
    assert drive(tmp_path, 0.0, *more, 94).keys() == {"base"}
    rows = drive(tmp_path, 0.0, *more, 100)
    assert sorted(found["status"] for found in rows.values()) == ["dropped", "finished", "finished", "finished"]


def test_time_is_kept_for_a_run_whose_model_to_begin_with_is_trained_again(tmp_path, monkeypatch):
    monkeypatch.setitem(driver.STEP_S, "rl", 29.0)
    known = luffy_is_decided(tmp_path)
    rates = ((3e-6, 0.9), (1e-6, 0.8), (1e-5, 0.1))
    others = [contest_row(method, lr, "finished", a, step=200) for method in ("sft", "sft_rl") for lr, a in rates]
    write_lines(known, [*records.read_lines(known), *others, contest_row("sft", 3e-5, "finished", 0.1)])
    more = ("--runs", "sft_rl-lr*-s1", "luffy-lr*-s2", "--known", known, "--whole", "--minutes", 100)
    drive(tmp_path, 0.0, *more)
    jobs = records.read_lines(tmp_path / "collected" / "jobs.jsonl")
    began = [job["job"] for job in jobs if job["what"] == "started" and " " not in job["job"]]
    assert began == ["sft-lr3e-06-s1", "sft_rl-lr3e-06-s1", "luffy-lr3e-06-s2"]
    (tmp_path / "failing").mkdir()
    rows = drive(tmp_path / "failing", 0.0, *more, fails="sft-lr3e-06-s1")
    assert {name: found["status"] for name, found in rows.items()} == {
        "sft-lr3e-06-s1": "failed", "luffy-lr3e-06-s2": "finished"}  # fmt: skip


def test_a_run_that_was_cut_late_decides_its_contest(tmp_path):
    luffy = [contest_row("luffy", 3e-6, "cut", 0.9, step=160), contest_row("luffy", 1e-6, "finished", 0.8, step=200)]
    luffy.append(contest_row("luffy", 1e-5, "dropped", 0.1, step=25))
    assert records.best_rates(luffy) == {"luffy": 3e-6}
    luffy[0]["curves"]["step"][-1] = 120
    assert records.best_rates(luffy) == {}
    assert not records.is_done(contest_row("luffy", 3e-6, "cut") | {"curves": {"step": []}})
    known = luffy_is_decided(tmp_path)
    write_lines(known, [found | {"status": "cut"} for found in records.read_lines(known)[:1]])
    assert drive(tmp_path, 0.0, "--runs", "luffy-lr3e*-s0", "--known", known).keys() == {"base"}
    assert "luffy-lr3e-06-s0" in drive(tmp_path, 0.0, "--runs", "luffy-lr3e-06-s0", "--known", known)


def test_a_run_that_another_machine_finished_but_did_not_test_is_done_again(tmp_path):
    known = sft_is_decided(tmp_path)
    untested = contest_row("sft", 1e-5, "finished", seed=1)
    del untested["test"]
    write_lines(known, [*records.read_lines(known), untested, contest_row("sft", 1e-5, "finished", seed=2)])
    assert drive(tmp_path, 0.0, "--runs", "sft-lr*-s[12]", "--known", known).keys() == {"sft-lr1e-05-s1"}


def test_a_run_that_was_dropped_stays_so_when_the_time_is_up(tmp_path, monkeypatch):
    status = tmp_path / "runs" / "luffy-lr1e-06-s0" / "status.json"
    monkeypatch.setattr(driver.Driver, "_is_late", lambda self: status.exists() and "dropped" in status.read_text())
    rows = drive(tmp_path, 0.0, "--runs", "luffy-lr*-s0")
    assert rows["luffy-lr1e-06-s0"]["status"] == "dropped" and "test" not in rows["luffy-lr1e-06-s0"]


def test_a_rate_that_another_machine_finished_counts_at_the_rung(tmp_path):
    finished = contest_row("luffy", 3e-6, "finished", step=200)
    finished["curves"] = {"step": [25, 200], "val-core/accuracy": [0.325, 0.5]}
    rows = drive(tmp_path, 0.0, "--runs", "luffy-lr*-s0", "--known", write_lines(tmp_path / "known.jsonl", [finished]))
    assert {name: found["status"] for name, found in rows.items() if name != "base"} == {
        "luffy-lr1e-06-s0": "dropped", "luffy-lr1e-05-s0": "finished"}  # fmt: skip


def test_a_gguf_file_becomes_the_tensors_that_transformers_reads(tmp_path):
    gguf = pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from studies.qwen import weights

    generator = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(4, 8, generator=generator)
        for name in ("token_embd.weight", "output.weight", "blk.1.attn_q.weight")
    }
    given |= {
        "output_norm.weight": torch.randn(8, generator=generator),
        "blk.0.attn_k.bias": torch.randn(4, generator=generator),
    }
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    for name, tensor in given.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights.convert(tmp_path / "x.gguf", tmp_path / "model.safetensors", processes=2)
    found = load_file(tmp_path / "model.safetensors")
    expected = {
        "model.embed_tokens.weight": given["output.weight"],
        "model.norm.weight": given["output_norm.weight"],
        "model.layers.1.self_attn.q_proj.weight": given["blk.1.attn_q.weight"],
        "model.layers.0.self_attn.k_proj.bias": given["blk.0.attn_k.bias"],
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)
