"""The study on Qwen2.5: its plan, its contests, what it keeps of a run, and a driver that loses nothing."""

import json
import os
import re
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

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
        path.write_text(yaml.safe_dump(run.recipe(tmp_path / "base", tmp_path / "data", tmp_path)))
        cfg = load_config(path)
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
        path.write_text(yaml.safe_dump(plan.Run(method, 1e-6).recipe(tmp_path, tmp_path, tmp_path)))
        recipes[method] = load_config(path)
    seen = {m: (c.guidance.n_prefix, c.algorithm.off_policy_reshape, c.algorithm.remove_clip, c.algorithm.trace_term)
            for m, c in recipes.items() if m != "sft"}  # fmt: skip
    assert seen["luffy"] == (1, "p_div_p_0.1", True, "rl") and seen["luffy_clip"] == (1, "p_div_p_0.1", False, "rl")
    assert seen["mixed"] == (1, "no_reshape", False, "rl")
    assert seen["on_policy"][0] == seen["sft_rl"][0] == 0 and seen["rl_sft_loss"][3] == "sft"


def test_what_depends_on_a_choice_waits_for_it():
    early = [unit.method for unit in plan.plan({}) if isinstance(unit, plan.Contest)]
    assert early == ["luffy", "on_policy", "sft", "mixed", "rl_sft_loss"] and len(plan.runs_of(plan.plan({}))) == 15
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


def row(method, lr, status, accuracy=0.5, seed=0, note="", step=10):
    curves = {"step": [0, step], "val-core/accuracy": [0.1, accuracy]}
    return {"name": f"{method}-lr{lr:g}-s{seed}", "method": method, "lr": lr, "status": status, "seed": seed,
            "note": note, "curves": curves}  # fmt: skip


def test_a_rate_is_chosen_when_its_contest_is_decided():
    luffy = [row("luffy", 1e-6, "dropped", 0.9), row("luffy", 3e-6, "finished"), row("luffy", 1e-5, "dropped")]
    sft = [row("sft", lr, "finished", a) for lr, a in ((3e-6, 0.3), (1e-5, 0.5), (3e-5, 0.4))]
    running = [row("mixed", 1e-6, "dropped"), row("mixed", 3e-6, "running"), row("mixed", 1e-5, "dropped")]
    others = [row("on_policy", 1e-6, "finished"), row("luffy", 1e-4, "finished", 0.99, seed=1)]
    assert records.best_rates([*luffy, *sft, *running, *others]) == {"luffy": 3e-6, "sft": 1e-5}


def test_what_an_earlier_machine_dropped_goes_on_if_the_rungs_of_today_let_it():
    curves = {1e-6: {25: 0.3, 100: 0.4}, 3e-6: {25: 0.4, 100: 0.5}, 1e-5: {25: 0.2}}
    known = {}
    for lr, found in curves.items():
        one = row("luffy", lr, "dropped")
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
    cut, again = row("luffy", 1e-6, "cut", step=50), row("luffy", 1e-6, "running", step=20)
    for name, found in (("a", cut), ("b", again)):
        (tmp_path / name).write_text(json.dumps(found) + "\n")
    assert records.read_rows([tmp_path / "a", tmp_path / "b"])[cut["name"]]["status"] == "cut"


def test_validation_problems_are_not_trained_on(tmp_path):
    traces = [{"token_ids": [1, 2], "log_probs": [-0.5, -1.0]}] * 4
    rows = [{"id": f"train:{i}", "prompt": f"p{i}", "answer": str(i), "traces": traces[: i % 5]} for i in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "traces.parquet")
    lines = "".join(json.dumps({"question": f"p{i}", "answer": f"#### {i}"}) + "\n" for i in range(600))
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(lines)
    out = tmp_path / "out"
    counts = sets.make(tmp_path, tmp_path / "traces.parquet", out, {row["id"]: i % 2 for i, row in enumerate(rows)})
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
    assert all(int(row["id"].split(":")[1]) % 2 == 0 for row in train["train-hard"]) and train["train-hard"]
    assert max(len(row["traces"]) for row in train["train-traces1"]) == 1
    assert "log_probs" not in train["train"][0]["traces"][0] if train["train"][0]["traces"] else True


NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?!\w)")


@pytest.fixture(scope="module")
def figures():
    pytest.importorskip("matplotlib")
    from studies.qwen import figures

    return figures


def test_the_page_says_what_the_results_say(figures):
    text, rows = figures.PAGE.read_text(encoding="utf-8"), figures.read()
    assert figures.fill(text, rows) == text and all(f"<!-- {name} -->" in text for name in figures.TABLES)
    lines = text.partition("\n## Appendix")[0].splitlines()  # the appendix is another study's
    known = {number for line in lines if line.startswith("|") for number in NUMBER.findall(line)}
    known |= {"0.6", "2604.23747"}  # the temperature; a paper
    known |= {"40.0"}  # see test_counts_in_the_prose_of_the_page
    known.add(f"{100 * (0.42 * 0.58 / 512) ** 0.5:.1f}")  # the standard error of the validation accuracy
    prose = [line for line in lines if not line.startswith("|")]
    unknown = {number for line in prose for number in NUMBER.findall(line)} - known
    assert not unknown
    caption = (ROOT / "README.md").read_text(encoding="utf-8").partition("*A real model")[2].partition("*\n")[0]
    assert len(set(NUMBER.findall(caption)) & known) == 6 and set(NUMBER.findall(caption)) <= known | {"2.5"}


def test_counts_in_the_prose_of_the_page(figures):
    by_name = {row["name"]: row for row in figures.read()}
    luffy, on_policy = by_name["luffy-lr3e-06-s0"], by_name["on_policy-lr3e-06-s0"]
    assert min(groups_left(figures, luffy)) > 32 and len(groups_left(figures, luffy)) == 200  # two updates before, too
    assert min(groups_left(figures, on_policy)) >= 2 and len(groups_left(figures, on_policy)) == 167
    assert len(by_name) == 18 and "base" in by_name
    again = records.read_rows([figures.HERE / "results" / "2026-11-16-c.jsonl"])["sft-lr1e-05-s0"]
    assert f"{100 * sum(figures.shares(again)) / 1319:.1f}" == "40.0"
    sft = [row for row in by_name.values() if row["method"] == "sft"]
    assert max(sft, key=lambda row: figures.last(row, figures.VALIDATION))["lr"] == 3e-6  # the earlier rule
    assert min(sft, key=lambda row: sum(figures.shares(row)))["lr"] == 3e-6
    for method in ("luffy", "on_policy"):  # 25 and 50 would have chosen as 50 and 100 did
        curves = {row["lr"]: records.validations(row["curves"]) for row in by_name.values() if row["method"] == method}
        assert max(curves, key=lambda lr: curves[lr][50]) == 3e-6 and min(curves, key=lambda lr: curves[lr][25]) == 1e-5


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
    other["test"]["in_order"] = False
    apart = figures.difference([row], [other], figures.shares)
    assert paired == "+18.8 (-4.7 to +42.2)" and apart == "+18.8 (-45.7 to +83.2)"


STAND_IN = """
import json, pathlib, signal, sys, time, yaml
command, what, *rest = sys.argv[1:]
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
if command == "eval":
    out = pathlib.Path(rest[rest.index("--out") + 1]); out.mkdir(parents=True)
    assert (pathlib.Path(what) / "weights").exists()
    rows = [{"id": f"t:{i}", "sample": k, "score": float(i == 0), "tokens": 10, "finish": "stop"} for i in (1, 0) for k in range(4)]
    (out / "items.jsonl").write_text("".join(json.dumps(r) + chr(10) for r in rows)); (out / "result.json").write_text("{}")
    sys.exit(0)
cfg = yaml.safe_load(open(what)); folder = pathlib.Path(cfg["out"]) / cfg["name"]
assert (pathlib.Path(cfg["model"]["path"]) / "weights").exists()
def save(step):
    model = folder / "checkpoints" / f"step-{step}" / "model"; model.mkdir(parents=True)
    (model / "weights").write_text(str(step)); (folder / "checkpoints" / "latest").symlink_to(f"step-{step}")
with open(folder / "metrics.jsonl", "a") as file:
    for step in range(0, cfg["train"]["steps"] + 1, 25):
        accuracy = {1e-6: 0.1, 3e-6: 0.3, 1e-5: 0.2, 3e-5: 0.1}[cfg["optim"]["lr"]] + step / 1000
        file.write(json.dumps({"step": step, "time": time.time(), "val-core/accuracy": accuracy}) + chr(10)); file.flush()
        if command == "train" and (cfg["optim"]["lr"], step) == (1e-6, 25):
            time.sleep(100)  # the driver ends it
            sys.exit(3)
        time.sleep(SLEEP)
        if stopped:
            save(step); sys.exit(1)
save(cfg["train"]["steps"])
"""


def drive(tmp_path, sleep, *more):
    """The driver with a stand-in for ``luffy`` that learns faster at 3e-6."""
    script = tmp_path / "luffy.py"
    script.write_text(textwrap.dedent(STAND_IN).replace("SLEEP", str(sleep)))
    for name in ("data", "model"):
        (tmp_path / name).mkdir(exist_ok=True)
    for path in ("data/train.parquet", "data/test.jsonl", "model/weights"):
        (tmp_path / path).write_text("")
    arguments = ["--model", tmp_path / "model", "--data", tmp_path / "data", "--out", tmp_path / "runs", "--collect",
                 tmp_path / "collected", "--luffy", f"{sys.executable} {script}", "--poll-s", "0.05", *more]  # fmt: skip
    driver.main([str(argument) for argument in arguments])
    return records.read_rows([tmp_path / "collected" / "runs.jsonl"])


def test_a_contest_ends_with_the_best_rate_tested_and_a_second_call_goes_on_with_the_seeds(tmp_path):
    more = ("--runs", "luffy-lr*", "--minutes", "10")
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
    known = tmp_path / "known.jsonl"
    lost = [row("luffy", 1e-6, "dropped", 0.1, step=25), row("luffy", 1e-5, "finished", 0.2, step=25)]
    lost.append(row("luffy", 3e-6, "cut", 0.3, step=25))
    known.write_text("".join(json.dumps(found) + "\n" for found in lost))
    rows = drive(tmp_path, 0.5, "--runs", "luffy-lr*", "--minutes", "10", "--known", known)
    (cut,) = [found for found in rows.values() if found["method"] == "luffy"]
    assert cut["name"] == "luffy-lr3e-06-s0" and cut["status"] == "cut" and "test" in cut
    assert os.path.exists(tmp_path / "runs" / cut["name"] / "checkpoints" / "latest")


def test_a_model_of_another_machine_is_trained_again_for_the_runs_that_begin_with_it(tmp_path):
    known = tmp_path / "known.jsonl"
    sft = [row("sft", lr, "finished", a) for lr, a in ((3e-6, 0.1), (1e-5, 0.9), (3e-5, 0.8))]
    known.write_text(
        "".join(
            json.dumps(found) + "\n"
            for found in [*sft, {"name": "base", "method": "base", "status": "finished", "curves": {}}]
        )
    )
    rows = drive(tmp_path, 0.0, "--runs", "sft_rl-lr*-s0", "--minutes", "10", "--known", known)
    assert {name: found["status"] for name, found in rows.items()} == {
        "sft-lr1e-05-s0": "finished", "sft_rl-lr3e-06-s0": "finished", "sft_rl-lr1e-06-s0": "dropped",
        "sft_rl-lr1e-05-s0": "finished"}  # fmt: skip


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
