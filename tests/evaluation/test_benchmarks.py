"""Suites from a data folder: the paper's order, repeated rows, what is missing."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luffy.errors import DataError, UserError
from luffy.evaluation.benchmarks import load_suite

SOURCES = ("math", "olympiad_bench", "minerva", "aime", "amc", "aime25")


def benchmark_row_of_verl(source, question, gold):
    prompt = [{"role": "system", "content": "be good"}, {"role": "user", "content": question}]
    return {"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": gold, "style": "rule"}}


@pytest.fixture
def folder(tmp_path):
    rows = []
    for source in SOURCES:
        copies = 32 if source in ("aime", "aime25", "amc") else 1
        for _ in range(copies):
            rows += [benchmark_row_of_verl(source, f"{source} {n}?", str(n)) for n in range(3)]
    (tmp_path / "benchmarks").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "benchmarks/math6.parquet")
    arc = [benchmark_row_of_verl("arc_c", f"q{n}\n\nA) x{n}\nB) y{n}\nC) z{n}\n", "B") for n in range(20)]
    pq.write_table(pa.Table.from_pylist(arc), tmp_path / "benchmarks/arc_c.parquet")
    return tmp_path


def test_math6_is_in_the_papers_order_with_its_numbers_of_samples(folder):
    suite = load_suite("math6", folder)
    assert [b.title for b in suite.benchmarks] == ["AIME24", "AIME25", "AMC", "MATH-500", "Minerva", "Olympiad"]
    assert [b.k for b in suite.benchmarks] == [32, 32, 32, 1, 1, 1]
    assert {b.reward for b in suite.benchmarks} == {"math"}
    assert [b.k for b in load_suite("math6", folder, k=4).benchmarks] == [4] * 6


def test_the_suite_of_figure_12_is_two_of_the_six(folder):
    suite = load_suite("aime_amc", folder, k=8)
    assert [(b.title, b.k) for b in suite.benchmarks] == [("AIME24", 8), ("AMC", 8)]


def test_rows_repeated_for_avg_at_32_are_one_problem(folder):
    aime = load_suite("math6", folder).benchmarks[0]
    assert (len(aime.problems), aime.repeats) == (3, 32)
    assert [p.id for p in aime.problems] == ["aime24:0", "aime24:1", "aime24:2"]
    assert aime.problems[1].prompt == "aime 1?"  # the file's system message is not part of the question


def test_uneven_repeats_are_an_error(folder):
    path = folder / "benchmarks/math6.parquet"
    rows = pq.read_table(path).to_pylist()
    pq.write_table(pa.Table.from_pylist([*rows, rows[-1]]), path)
    with pytest.raises(DataError, match="97 rows of AIME25 repeat 3 problems unevenly"):
        load_suite("math6", folder)


def test_missing_benchmarks_are_named(folder):
    suite = load_suite("ood", folder)
    assert [b.title for b in suite.benchmarks] == ["ARC-c"]
    assert [name.split(" ")[0] for name in suite.missing] == ["GPQA*", "MMLU-Pro"]
    fetch = rf"GSM8K .*gsm8k/test.jsonl\); fetch it: curl --create-dirs --output {folder}/gsm8k/test.jsonl https://"
    with pytest.raises(UserError, match=rf"suite gsm8k: none of its files is there: {fetch}"):
        load_suite("gsm8k", folder)


def test_options_are_shuffled_by_the_seed(folder):
    def golds(**options):
        return [p.answer for p in load_suite("ood", folder, **options).benchmarks[0].problems]

    assert golds(shuffle=False) == ["B"] * 20
    assert set(golds(seed=0)) == set("ABC")
    assert golds(seed=0) == golds(seed=0) != golds(seed=1)
    for number, problem in enumerate(load_suite("ood", folder, seed=3).benchmarks[0].problems):
        assert f"{problem.answer}) y{number}" in problem.prompt


def test_limit(folder):
    assert [len(b.problems) for b in load_suite("math6", folder, limit=2).benchmarks] == [2] * 6


def test_a_file_keeps_its_ids_and_chats(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q\nA) x\nB) y"}]
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"id": "one", "prompt": chat, "answer": "A", "traces": ["long"]}) + "\n")
    [benchmark] = load_suite(str(path), reward="choice", k=3).benchmarks
    [problem] = benchmark.problems
    assert (benchmark.name, benchmark.k, problem.id, problem.traces) == ("mine", 3, "one", ())
    assert problem.prompt[0].content == "s" and f"{problem.answer}) x" in problem.prompt[1].content


def test_a_file_with_columns_of_other_names(tmp_path, folder):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"q": "1+1", "meta": {"gold": 2}, "key": "one"}) + "\n")
    columns = {"prompt": "q", "answer": "meta.gold", "id": "key", "traces": "solution"}  # as in training
    [problem] = load_suite(str(path), columns=columns).benchmarks[0].problems
    assert (problem.id, problem.prompt, problem.answer, problem.traces) == ("one", "1+1", "2", ())
    with pytest.raises(UserError, match="names no prompt column"):
        load_suite(str(path), columns={"traces": "solution"})
    with pytest.raises(UserError, match="--column names columns of a file, and math6 is a suite"):
        load_suite("math6", folder, columns=columns)


def test_no_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("LUFFY_DATA", raising=False)
    with pytest.raises(UserError, match="give --data FOLDER or set LUFFY_DATA"):
        load_suite("math6")
    with pytest.raises(UserError, match="does not exist"):
        load_suite("math6", tmp_path / "nowhere")


def test_unknown_suite():
    with pytest.raises(UserError, match=r"--suite maths6: neither a suite \(math6, ood, gsm8k, aime_amc\) nor a file"):
        load_suite("maths6")


def test_a_row_without_options_is_named_and_the_rest_is_evaluated(folder):
    gpqa = [benchmark_row_of_verl("gpqa", f"q{n}\n\nA) x{n}\nB) y{n}\n", "B") for n in range(4)]
    gpqa[2] = benchmark_row_of_verl("gpqa", "Name the compound.", "B")
    pq.write_table(pa.Table.from_pylist(gpqa), folder / "benchmarks/gpqa.parquet")
    suite = load_suite("ood", folder)
    assert {b.title: len(b.problems) for b in suite.benchmarks} == {"ARC-c": 20, "GPQA*": 3}
    assert [p.id for p in suite.benchmarks[1].problems] == ["gpqa:0", "gpqa:1", "gpqa:3"]
    [row] = suite.left_out
    assert row.startswith("GPQA*, problem 'gpqa:2': no options found")


@pytest.mark.parametrize("reward", ["1 choice + 0.1 format", "my_module:my_reward"])
def test_options_are_shuffled_whatever_reads_the_answer(folder, reward):
    plain, other = (load_suite("ood", folder, reward=kind).benchmarks[0] for kind in (None, reward))
    assert other.problems == plain.problems and other.reward == reward


def test_a_benchmark_of_unreadable_rows_does_not_stop_the_others(folder):
    pq.write_table(
        pa.Table.from_pylist([benchmark_row_of_verl("gpqa", "Name it.", "B")]), folder / "benchmarks/gpqa.parquet"
    )
    suite = load_suite("ood", folder)
    assert [b.title for b in suite.benchmarks] == ["ARC-c"]
    assert any("no row can be read" in name for name in suite.missing)  # so "Avg." says of how many


def test_a_file_of_unreadable_rows_is_an_error(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "Name it.", "answer": "B"}\n')
    with pytest.raises(DataError, match="no row can be evaluated; the first: mine, problem .*no options found"):
        load_suite(str(path), reward="choice")
