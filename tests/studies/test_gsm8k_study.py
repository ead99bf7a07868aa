"""The study's own code: problems whose answers are right, runs that can be built, a driver that loses nothing."""

import argparse
import json
import re
import shutil
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import write_rows

FOLDER = Path(__file__).parents[2] / "studies" / "gsm8k"
sys.path.insert(0, str(FOLDER))

import make_data  # noqa: E402
import plan  # noqa: E402
import run as driver  # noqa: E402
import stories  # noqa: E402
import variants  # noqa: E402

from luffy.rewards.numeric import score_strict  # noqa: E402

SUM = re.compile(r"(\d+) ([*+/-]) (\d+) = (\d+)")


def test_every_line_of_a_solution_calculates_and_leads_to_the_answer():
    for row in stories.stories(5, 400, (1, 2, 3, 4, 5)):
        (trace,) = row["traces"]
        sums = SUM.findall(trace)
        assert len(sums) == row["steps"]
        for a, sign, b, result in sums:
            left, right = Fraction(a), Fraction(b)
            assert {"*": left * right, "+": left + right, "-": left - right, "/": left / right}[sign] == int(result)
        assert sums[-1][3] == row["answer"] and score_strict(row["answer"], trace)[0] == 1.0
        assert all(a == prev for prev, (a, *_) in zip([x[3] for x in sums], sums[1:], strict=False))


def test_stories_are_the_same_for_a_seed_and_lengths_are_even():
    rows = list(stories.stories(1, 80, (1, 2, 3, 4)))
    assert rows == list(stories.stories(1, 80, (1, 2, 3, 4))) and rows != list(stories.stories(2, 80, (1, 2, 3, 4)))
    assert [sum(r["steps"] == n for r in rows) for n in (1, 2, 3, 4)] == [20] * 4
    assert len({r["prompt"] for r in rows}) == 80


def test_held_out_wordings_are_not_trained_on():
    known = " ".join(r["prompt"] for r in stories.stories(0, 1000, (1, 2, 3, 4)))
    held_out = " ".join(r["prompt"] for r in stories.stories(0, 400, (1, 2, 3, 4), held_out=True))
    for words in ("end up with", "apiece", "split evenly", "picks up another", "one half of all"):
        assert words in held_out and words not in known


APPLES = {
    "question": "Mary buys 5 bags of 8 apples and gives 4 apples to John. How many does she have?",
    "answer": "She has 5*8=<<5*8=40>>40.\nThen 40-4=<<40-4=36>>36.\n#### 36",
}


def test_a_variant_has_other_numbers_and_their_answer():
    made = [variants.variant(APPLES, variants.random.Random(seed)) for seed in range(20)]
    for row in filter(None, made):
        bags, apples, given = map(int, re.findall(r"\d+", row["prompt"]))
        assert int(row["answer"]) == bags * apples - given and (bags, apples, given) != (5, 8, 4)
        assert "Mary" not in row["prompt"] and "purchases" in row["prompt"]
    assert sum(row is not None for row in made) >= 15


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("5 bags of 5 apples?", "<<5*5=25>>25\n#### 25"),  # which five?
        ("5 bags of 8 for five people?", "<<5*8=40>>40\n<<40/5=8>>8\n#### 8"),  # five stands there twice
        ("8 cats and 2 dogs, 16 in all?", "<<8*2=16>>16\n#### 16"),  # 16 is given and comes out
        ("9 pens and 4 more?", "<<9+4=14>>14\n#### 14"),  # the marks are wrong
        ("9 pens and 4 more?", "13 pens\n#### 13"),  # no program
        ("Three times eight pens?", "<<3*8=24>>24\n#### 24"),  # words stay, so the answer does
        ("50 ants and half as many bugs?", "25 bugs.\n<<25+50=75>>75\n#### 75"),  # 25 from nowhere
        ("5 classes every weekday?", "<<5*5=25>>25\n#### 25"),  # the other five is in no digit
        ("1/4 of 364 miles, and 1/2?", "<<3/4*364=273>>273\n#### 273"),  # 3/4 was added up in the head
        ("40% more than 30?", "12 more.\n<<12+30=42>>42\n#### 42"),  # so was 12
    ],
)
def test_what_is_not_clear_is_left_alone(question, answer):
    row = {"question": question, "answer": answer}
    assert all(variants.variant(row, variants.random.Random(seed)) is None for seed in range(10))


def test_a_number_in_words_stays_in_the_program_too():
    row = {"question": "Tom has 8 pens and three times as many caps. All in all?",
           "answer": "<<8*3=24>>24\n<<24+8=32>>32\n#### 32"}  # fmt: skip
    made = [variants.variant(row, variants.random.Random(seed)) for seed in range(10)]
    for other in filter(None, made):
        (pens,) = map(int, re.findall(r"\d+", other["prompt"]))
        assert pens != 8 and int(other["answer"]) == 4 * pens
    assert any(made)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    given = tmp_path_factory.mktemp("given")
    for folder in ("gsm8k", "benchmarks"):
        (given / folder).mkdir(parents=True)
    for name in ("train", "test"):
        (given / "gsm8k" / f"{name}.jsonl").write_text(json.dumps(APPLES) + "\n")
    math = [("math", "6 * 7?", "42"), ("math", "1 / 2?", "0.5"), ("math", "3 - 8?", "-5")]
    others = [(source, f"{source}?", "1") for source in ("aime", "aime25", "amc", "minerva", "olympiad_bench")]
    benchmark(given / "benchmarks" / "math6.parquet", math + others)
    benchmark(given / "benchmarks" / "arc_c.parquet", [("arc_c", "What is wet?\n\nA) sand\nB) water\nC) air\n", "B")])
    out = tmp_path_factory.mktemp("made") / "data"
    counts = make_data.make(given, out)
    assert counts["stories-train"] == 4000 and counts["stories-easy"] == 256 and counts["stories-warm"] == 1600
    return out


@pytest.fixture
def data(made, tmp_path):
    return shutil.copytree(made, tmp_path / "data")


def benchmark(path, rows):
    made = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"ground_truth": gold},
        }
        for source, question, gold in rows
    ]
    pq.write_table(pa.Table.from_pylist(made), path)


def test_benchmarks_become_problems_whose_answer_is_a_number(data):
    rows = {name: [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
            for name in ("math-integers", "arc-numbers")}  # fmt: skip
    assert [(r["prompt"], r["answer"]) for r in rows["math-integers"]] == [("6 * 7?", "42"), ("3 - 8?", "-5")]
    (arc,) = rows["arc-numbers"]
    assert arc["answer"] == "2" and arc["prompt"].endswith("\n1) sand\n2) water\n3) air")


def test_gsm8k_is_split_by_the_calculations_of_its_solutions(data):
    rows = {name: (data / f"gsm8k-{name}.jsonl").read_text().split() for name in ("train-hard", "hard")}
    assert rows == {"train-hard": [], "hard": []}  # the apples take two
    for name in ("train-easy", "easy"):
        assert json.loads((data / f"gsm8k-{name}.jsonl").read_text()) == APPLES
    counts = [make_data.calculations({"answer": f"{'<<1+1=2>>2 ' * n}#### 2"}) for n in range(4)]
    assert counts == [0, 1, 2, 3]


def test_on_gsm8k_each_question_is_asked_of_the_sets_that_its_table_shows(data, tmp_path):
    runs = [run for name in ("ablation", "gamma", "split") for run in plan.PLAN[name]() if run.task == "gsm8k"]
    assert len(runs) == 3 * (3 + 4 + 4)
    for run in runs:
        sets = run.config(data, "base", tmp_path).data
        held_out = {"core": sets.eval, **sets.eval_also}
        names = {"core": "gsm8k-easy", "hard": "gsm8k-hard"} if run.question == "split" else {"core": "gsm8k-test"}
        assert held_out == {name: str(data / f"{file}.jsonl") for name, file in names.items()}
        train = f"gsm8k-train-{run.note}.jsonl" if run.note else "gsm8k-train.jsonl"
        assert sets.train == str(data / train)


def test_held_out_stories_are_not_in_the_training_set(data):
    rows = {p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in data.glob("stories-*.jsonl")}
    trained = {r["prompt"] for r in rows["stories-train"]}
    for name in ("stories-easy", "stories-hard", "stories-words", "stories-longer"):
        assert not trained & {r["prompt"] for r in rows[name]}
    assert {r["steps"] for r in rows["stories-train-hard"]} == {3, 4}
    others = {r["prompt"] for name, found in rows.items() if name != "stories-warm" for r in found}
    assert not others & {r["prompt"] for r in rows["stories-warm"]}


def test_every_run_of_the_plan_has_a_config_and_something_to_start_from(data, tmp_path):
    every = [run for question in plan.PLAN.values() for run in question()]
    names = [run.name for run in every]
    assert len(set(names)) == len(names) > 100
    for run in every:
        cfg = run.config(data, "base", tmp_path)
        assert cfg.name == run.name and cfg.optim.lr == run.lr and Path(str(cfg.data.train)).exists()
        assert run.start is None or (run.start in names and cfg.model.path == str(tmp_path / run.start / "model"))


def test_only_the_first_runs_on_gsm8k_show_what_was_before(data, tmp_path):
    every = {run.name: run.config(data, "base", tmp_path).eval.every for run in plan.PLAN["main"]()}
    assert [every[f"main-gsm8k-luffy-s{seed}"] for seed in plan.SEEDS] == [60, 0, 0]
    assert [every[f"main-stories-luffy-s{seed}"] for seed in plan.SEEDS] == [30, 30, 30]


def test_methods_differ_in_what_they_differ_in(data, tmp_path):
    cfgs = {m: plan.Run("main", "stories", m, 0, 1e-5).config(data, "base", tmp_path) for m in plan.METHODS}
    assert [cfgs[m].guidance.n_prefix for m in ("on_policy", "mixed", "luffy")] == [0, 1, 1]
    shape = {m: (c.algorithm.off_policy_reshape.shown, c.algorithm.remove_clip) for m, c in cfgs.items()}
    assert shape["mixed"] == ("no_reshape", False) and shape["mixed_shaping"] == ("p_div_p (gamma 0.1)", False)
    assert shape["luffy"] == ("p_div_p (gamma 0.1)", True) and shape["luffy_gamma_0.5"] == ("p_div_p (gamma 0.5)", True)
    assert {c.algorithm.entropy_coef for c in cfgs.values()} == {0.0}
    assert cfgs["on_policy_shaping"].algorithm.on_policy_reshape.shown == "p_div_p (gamma 0.1)"


class Pool:
    """Runs what is submitted at once, by a stand-in for training."""

    def __init__(self, outcome):
        self.outcome, self.seen = outcome, []

    def __call__(self, *_, **__):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def submit(self, do, data, model, out, deadline):
        job = do.__self__
        self.seen.append(job.name)
        future = Future()
        try:
            future.set_result(self.outcome(job, out))
        except Exception as error:
            future.set_exception(error)
        return future


def finished(job, out):
    folders = [out / job.run.name / f"pass-{t}" for t in plan.TEMPERATURES] if job.sampling else [out / job.run.name]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    about = {"question": job.run.question, "task": "stories", "method": job.run.method, "seed": 0, "lr": 1e-5}
    values = {"step": 60, "val-core/accuracy": 0.5, "val-hard/accuracy": 0.25}
    summary = {"benchmarks": {"x": {"accuracy": 0.5, "pass_at": {"8": 0.75}}}}
    if job.sampling:
        for folder in folders:
            (folder / "result.json").write_text(json.dumps(summary))
    else:
        (out / job.run.name / "metrics.jsonl").write_text(json.dumps(values) + "\n")
        (out / job.run.name / "done.json").write_text(json.dumps(about))
    return "1 s"


def slice_of(tmp_path, data, questions=("main",), known=(), tasks=("stories",)):
    args = {
        "questions": list(questions),
        "tasks": list(tasks),
        "at_once": 2,
        "minutes": 1.0,
        "collect": tmp_path / "all.jsonl",
    }
    args |= {"known": list(known)}
    return driver.Slice(argparse.Namespace(**args, data=data, model="base", out=tmp_path / "runs"))


def test_a_run_waits_for_the_one_it_starts_from_and_a_second_call_has_nothing_to_do(data, tmp_path, monkeypatch):
    pool = Pool(finished)
    monkeypatch.setattr(driver, "ProcessPoolExecutor", pool)
    slice_of(tmp_path, data).go()
    assert sorted(pool.seen) == sorted(run.name for run in plan.PLAN["main"]() if run.task == "stories")
    for seed in plan.SEEDS:
        assert pool.seen.index(f"main-stories-sft-s{seed}") < pool.seen.index(f"main-stories-sft_rl-s{seed}")
    again = Pool(finished)
    monkeypatch.setattr(driver, "ProcessPoolExecutor", again)
    slice_of(tmp_path, data).go()
    assert again.seen == []


def test_models_are_sampled_from_when_they_are_there(data, tmp_path, monkeypatch):
    pool = Pool(finished)
    monkeypatch.setattr(driver, "ProcessPoolExecutor", pool)
    slice_of(tmp_path, data, ("pass",), tasks=plan.TASKS).go()
    sampled = [name for name in pool.seen if name.endswith("pass@8")]
    methods = ("luffy", "on_policy", "sft")
    assert sorted(sampled) == [f"main-{task}-{m}-s0 pass@8" for task in ("gsm8k", "stories") for m in methods]
    assert sorted(set(pool.seen) - set(sampled)) == [name.removesuffix(" pass@8") for name in sorted(sampled)]
    for name in sampled:
        assert pool.seen.index(name.removesuffix(" pass@8")) < pool.seen.index(name)
    rows = {row["name"]: row for row in map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())}
    assert rows["main-stories-sft-s0"]["pass"]["0.2"] == {"accuracy": 0.5, "pass_at": {"8": 0.75}}
    assert len(rows) == 6


def test_what_an_earlier_machine_finished_is_run_again_only_for_its_model(data, tmp_path, monkeypatch):
    known = tmp_path / "known.jsonl"
    left = {"main-stories-luffy-s2", "main-stories-sft_rl-s1"}
    every = [run.name for run in plan.PLAN["main"]() if run.task == "stories"]
    all_sampled = {"pass": {str(t): {} for t in plan.TEMPERATURES}}
    rows = [
        {"name": name, "finished": name not in left} | (all_sampled if "on_policy" in name else {}) for name in every
    ]
    write_rows(known, rows)
    pool = Pool(finished)
    monkeypatch.setattr(driver, "ProcessPoolExecutor", pool)
    slice_of(tmp_path, data, known=[known]).go()
    assert sorted(pool.seen) == ["main-stories-luffy-s2", "main-stories-sft-s1", "main-stories-sft_rl-s1"]
    assert {json.loads(line)["name"] for line in (tmp_path / "all.jsonl").read_text().splitlines()} == set(every)
    part = slice_of(tmp_path, data, ("main", "pass"), [known])
    assert sorted(job.name for job in part.waiting) == [
        "main-stories-luffy-s0", "main-stories-luffy-s0 pass@8", "main-stories-sft-s0", "main-stories-sft-s0 pass@8",
    ]  # fmt: skip
    del all_sampled["pass"]["0.4"]  # all rows share it
    write_rows(known, rows)
    again = [job.name for job in slice_of(tmp_path, data, ("pass",), [known]).waiting]
    assert "main-stories-on_policy-s0 pass@8" in again


def test_what_is_known_stays_on_file_and_takes_part_in_the_choice(data, tmp_path, monkeypatch):
    known = tmp_path / "all.jsonl"  # also where this machine's go
    curves = {"val-core/accuracy": [[25, 0.9]], "val-hard/accuracy": [[25, 0.9]]}
    about = {"question": "tune", "task": "stories", "seed": 0, "lr": 7e-5, "finished": True, "curves": curves}
    rows = [{"name": "tune-stories-luffy-lr7e-05-s0", "method": "luffy", **about},
            {"name": "main-stories-sft-s0", "method": "sft", "pass": {"0.2": 1}, **about, "question": "main"}]  # fmt: skip
    write_rows(known, rows)
    monkeypatch.setattr(driver, "ProcessPoolExecutor", Pool(finished))
    part = slice_of(tmp_path, data, ("tune", "pass"), [known])
    part.go()
    kept = {row["name"]: row for row in map(json.loads, known.read_text().splitlines())}
    assert kept["tune-stories-luffy-lr7e-05-s0"]["lr"] == 7e-5 and "tune-stories-luffy-lr3e-05-s0" in kept
    assert driver.choose(part.rows())["luffy"] == 7e-5
    assert driver.read_rows([known, known])["main-stories-sft-s0"]["question"] == "main"


def test_a_row_of_a_later_file_adds_to_the_earlier_one(tmp_path):
    rows = [
        {"name": "a", "finished": True, "seconds": 1, "pass": {"0.2": 1}},
        {"name": "a", "finished": True, "seconds": 2},
    ]
    for name, row in zip("xy", rows, strict=True):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    (found,) = driver.read_rows([tmp_path / "x", tmp_path / "y"]).values()
    assert (found["seconds"], found["pass"]) == (2, {"0.2": 1})


def test_the_first_seed_of_all_questions_goes_first(data, tmp_path):
    waiting = slice_of(tmp_path, data, ("gamma", "split")).waiting
    seeds = [job.run.seed for job in waiting]
    assert seeds == sorted(seeds) and [job.run.question for job in waiting[:5]] == ["gamma"] * 4 + ["split"]


def test_warm_runs_begin_with_their_own_base_and_their_own_sft(data, tmp_path):
    runs = {run.name: run for run in plan.warm()}
    base = "warm-stories-sft-base-s0"
    assert runs[base].start is None and runs[base].config(data, "base", tmp_path).model.path == "base"
    assert runs["warm-stories-luffy-s1"].start == runs["warm-stories-sft-s2"].start == base
    assert runs["warm-stories-sft_rl-s1"].start == "warm-stories-sft-s1"
    assert runs["warm-stories-luffy-s1"].config(data, "base", tmp_path).model.path == str(tmp_path / base / "model")
    assert Path(str(runs[base].config(data, "base", tmp_path).data.train)).name == "stories-warm.jsonl"


def test_what_is_finished_is_on_file_before_the_slice_ends(data, tmp_path, monkeypatch):
    counts = []

    def counting(job, out):
        path = tmp_path / "all.jsonl"
        counts.append(len(path.read_text().splitlines()) if path.exists() else 0)
        return finished(job, out)

    monkeypatch.setattr(driver, "ProcessPoolExecutor", Pool(counting))
    slice_of(tmp_path, data).go()
    assert counts[-1] >= 16 and counts == sorted(counts)


def test_a_failure_is_tried_once_more_and_then_named(data, tmp_path, monkeypatch):
    def fails(job, out):
        if job.run.method == "luffy":
            raise MemoryError("no room")
        return finished(job, out)

    pool = Pool(fails)
    monkeypatch.setattr(driver, "ProcessPoolExecutor", pool)
    part = slice_of(tmp_path, data)
    part.go()
    assert set(part.failed) == {f"main-stories-luffy-s{seed}" for seed in plan.SEEDS}
    assert pool.seen.count("main-stories-luffy-s0") == 2 and pool.seen.count("main-stories-mixed-s0") == 1


def test_a_process_that_dies_costs_its_pool_and_no_run(data, tmp_path, monkeypatch):
    pools = []

    def dies_once(job, out):
        if len(pools) == 1 and len(pools[0].seen) == 3:
            raise BrokenProcessPool("a process was terminated abruptly")
        return finished(job, out)

    class Mortal(Pool):
        def submit(self, *arguments):
            if len(self.seen) >= 3 and self is pools[0]:
                raise BrokenProcessPool("a child process terminated abruptly")
            return super().submit(*arguments)

    monkeypatch.setattr(driver, "ProcessPoolExecutor", lambda *_, **__: pools.append(Mortal(dies_once)) or pools[-1])
    part = slice_of(tmp_path, data)
    part.go()
    assert len(pools) == 2 and len(pools[0].seen) == 3 and not part.failed
    assert all(job.is_done(tmp_path / "runs") for job in part.every())


def test_a_run_cut_by_its_slice_is_no_failure_and_not_started_again_in_it(data, tmp_path, monkeypatch):
    def cut(job, out):
        raise driver.SliceOver

    pool = Pool(cut)
    monkeypatch.setattr(driver, "ProcessPoolExecutor", pool)
    part = slice_of(tmp_path, data)
    part.go()
    assert not part.failed and len(pool.seen) == len(set(pool.seen)) == 15  # three wait for the SFT models


def test_metrics_are_collected_and_the_best_rate_is_chosen(tmp_path):
    for rate, accuracy in ((1e-5, 0.2), (3e-5, 0.4), (1e-4, 0.1)):
        folder = tmp_path / f"tune-{rate:g}"
        folder.mkdir()
        about = {"question": "tune", "method": "luffy", "lr": rate, "seconds": 1.0, "task": "stories", "seed": 0}
        (folder / "done.json").write_text(json.dumps(about))
        values = {"step": 25, "val-core/accuracy": accuracy, "val-hard/accuracy": accuracy / 2, "other": 1.0}
        (folder / "metrics.jsonl").write_text(json.dumps(values) + "\n")
    rows = driver.collect(tmp_path)
    assert [row["curves"]["val-core/accuracy"] for row in rows] == [[[25, 0.1]], [[25, 0.2]], [[25, 0.4]]]
    assert all("other" not in row["curves"] for row in rows)
    assert driver.choose(rows) == {"luffy": 3e-5}
