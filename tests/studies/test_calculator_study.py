"""GSM8K with a calculator: the recipes, the order of the processes, and the table."""

import json
import sys
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from luffy.config import load_config
from luffy.data import load_problems
from luffy.environments.call_formats import read_turn
from luffy.prepare.dataset_files import message_rows, traces_schema
from luffy.types import ToolCall
from studies.calculator import shots
from studies.calculator.run import BASE, RESULTS, Study, has_valid_call, known, names, recipe, table

# Stands in for luffy: notes what it is asked for, and ends an evaluation.
STUB = """
import json, sys
from pathlib import Path
command, what, *rest = sys.argv[1:]
with open({log!r}, "a") as file:
    print(command, Path(what).stem, file=file)
if command == "eval":
    out = Path(rest[rest.index("--out") + 1])
    out.mkdir(parents=True)
    (out / "result.json").write_text("{{}}")
    row = dict(id="test:1", score=1, calls=2, faults=[], turns=3, tokens=40)
    (out / "items.jsonl").write_text((json.dumps(row) + "\\n") * 4)
else:
    folder = Path({out!r}) / Path(what).stem
    (folder / "checkpoints").mkdir(parents=True)
    steps = [dict(step=1), {{"step": 2, "val-core/accuracy": 0.5, "val-core/environment/called": 0.25}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\\n" for step in steps))
"""


@pytest.fixture
def study(tmp_path):
    stub, log = tmp_path / "stub.py", tmp_path / "log.txt"
    stub.write_text(STUB.format(log=str(log), out=str(tmp_path / "out")))
    command = [sys.executable, str(stub)]
    return Study(tmp_path / "model", tmp_path, tmp_path / "out", tmp_path / "results.jsonl", command), log


@pytest.mark.parametrize("name", names())
def test_every_run_has_a_recipe_that_luffy_takes(tmp_path, name):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(name, tmp_path / "model", tmp_path, tmp_path)))
    cfg = load_config(str(path))
    assert (cfg.name, cfg.train.steps, cfg.environment.name) == (name, 100, "calculator")
    assert cfg.made_for == ("sft" if name.startswith("sft-") else "rl")
    assert "test.jsonl" not in str((cfg.data.train, cfg.data.eval))


def test_each_run_is_trained_then_tested_and_once_alone(study):
    runs, log = study
    runs.go(minutes=5, at_once=1, poll_s=0.01)
    done = log.read_text().splitlines()
    assert done[:3] == ["eval model", "train on_policy-s0", "eval on_policy-s0"]
    assert [line.split()[0] for line in done if line.endswith(" sft-s1")] == ["sft", "eval"]
    assert len(done) == 1 + 2 * len(names())
    runs.go(minutes=5, at_once=2, poll_s=0.01)
    assert log.read_text().splitlines() == done
    first, *rows = known(runs.results).values()
    run = {"right": "4", "called": 1.0, "turns": 3.0, "tokens": 40.0}
    assert first == {"name": BASE, **run, "validation": []}
    assert [row.pop("name") for row in rows] == names() and rows == [{**run, "validation": [[2, 0.5, 0.25]]}] * 10
    assert not list(runs.out.glob("*/checkpoints"))


def test_the_table_has_a_line_for_each_method(tmp_path):
    rows = [("luffy-s1", "44", 1.0), (BASE, "00", 0.5), ("luffy-s0", "40", 0.0)]
    lines = [dict(name=n, right=right, called=called, turns=2, tokens=10) for n, right, called in rows]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert table(tmp_path / "results.jsonl")[2:] == [
        f"|{BASE}|1|0.0 ± 0.0|0.0|50.0|2.0|10.0|",
        "|luffy|2|75.0 ± 25.0|50.0, 100.0|50.0|2.0|10.0|",
    ]


def test_the_page_has_the_table_of_the_results():
    page = Path(__file__).parents[2] / "docs" / "results" / "calculator.md"
    assert "\n".join(table(RESULTS)) in page.read_text(encoding="utf-8")
    assert {len(row["right"]) for row in known(RESULTS).values()} == {1319}


def test_when_the_time_is_up_nothing_is_begun(study):
    runs, log = study
    runs.go(minutes=0, at_once=2, poll_s=0.01)
    assert not log.exists()


def test_the_examples_of_the_teacher_are_right_and_not_in_its_traces(tmp_path):
    for _, steps, answer in shots.EXAMPLES:
        assert all(Fraction(eval(expression)) == Fraction(result) for _, expression, result in steps)
        assert rf"\boxed{{{steps[-1][-1]}}}" in answer
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "2+3?", "answer": "It is\n#### 5"}) + "\n")
    assert shots.write_asked(tmp_path / "train.jsonl", tmp_path / "asked.jsonl") == 1
    (problem,) = load_problems(tmp_path / "asked.jsonl")
    assert len(problem.prompt) == 2 + 3 * 8 and problem.answer == "5"
    assert read_turn(problem.prompt[2].content, "json").calls == (ToolCall("calculate", {"expression": "14 * 12"}),)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "calculate", "arguments": "{}"}], "name": None}
    said = {"role": "assistant", "content": "5", "tool_calls": None, "name": None}
    schema = traces_schema(load_problems(tmp_path / "asked.jsonl"), turns=True)
    row = {"id": "a", "prompt": message_rows(problem.prompt), "answer": "5"}
    reply = {**said, "role": "tool"}
    bad = [call, {**reply, "content": "error: no"}, said]
    row["traces"] = [{"messages": [said]}, {"messages": bad}, {"messages": [call, reply, said]}]
    rows = [row, {**row, "id": "b", "traces": row["traces"][:2]}]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "asked.parquet")
    assert shots.write_kept(tmp_path / "asked.parquet", tmp_path / "traces.parquet") == 1
    (problem,) = load_problems(tmp_path / "traces.parquet")
    assert problem.prompt == "2+3?" and len(problem.traces) == 1 and problem.traces[0].messages[0].tool_calls


@pytest.mark.parametrize(
    ("calls", "faults", "valid"),
    [(0, [], False), (1, [], True), (1, ["raised"], False), (2, ["raised"], True), (1, ["unreadable_call"], True)],
)
def test_a_valid_call_has_a_result(calls, faults, valid):
    assert has_valid_call({"calls": calls, "faults": faults}) is valid
