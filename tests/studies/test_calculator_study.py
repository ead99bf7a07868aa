"""GSM8K with a calculator: the recipes, the order of the processes, and the table."""

import json
import sys
from fractions import Fraction

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from luffy.config import load_config
from luffy.data import load_problems
from luffy.prepare.dataset_files import message_rows, traces_schema
from studies.calculator import shots
from studies.calculator.run import BASE, Study, has_valid_call, names, recipe

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
"""


@pytest.fixture
def study(tmp_path):
    stub, log = tmp_path / "stub.py", tmp_path / "log.txt"
    stub.write_text(STUB.format(log=str(log)))
    return Study(tmp_path / "model", tmp_path, tmp_path / "out", [sys.executable, str(stub)]), log


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


def test_the_table_has_a_line_for_each_method(study):
    runs, _ = study
    for name, right in ((BASE, (0, 0)), ("luffy-s0", (1, 0)), ("luffy-s1", (1, 1))):
        rows = [dict(id=f"test:{i}", score=r, calls=i, faults=[], turns=2, tokens=10) for i, r in enumerate(right)]
        runs.test(name).mkdir(parents=True)
        (runs.test(name) / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (runs.test(name) / "result.json").write_text("{}")
    lines = {line.split("|")[1]: line.split("|")[2:-1] for line in runs.table()[2:]}
    assert lines == {
        BASE: ["1", "0.0 ± 0.0", "0.0", "50.0", "2.0", "10.0"],
        "luffy": ["2", "75.0 ± 25.0", "50.0, 100.0", "50.0", "2.0", "10.0"],
    }


def test_when_the_time_is_up_nothing_is_begun(study):
    runs, log = study
    runs.go(minutes=0, at_once=2, poll_s=0.01)
    assert not log.exists()


def test_the_example_of_the_teacher_is_right_and_not_in_its_traces(tmp_path):
    for _, expression, result in shots.STEPS:
        assert Fraction(eval(expression)) == Fraction(result)
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "2+3?", "answer": "It is\n#### 5"}) + "\n")
    assert shots.write_asked(tmp_path / "train.jsonl", tmp_path / "asked.jsonl") == 1
    (problem,) = load_problems(tmp_path / "asked.jsonl")
    assert len(problem.prompt) == 10 and problem.answer == "5" and problem.prompt[2].tool_calls
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "calculate", "arguments": "{}"}], "name": None}
    said = {"role": "assistant", "content": "5", "tool_calls": None, "name": None}
    schema = traces_schema(load_problems(tmp_path / "asked.jsonl"), turns=True)
    row = {"id": "a", "prompt": message_rows(problem.prompt), "answer": "5"}
    row["traces"] = [{"messages": [said]}, {"messages": [call, {**said, "role": "tool"}, said]}]
    pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "asked.parquet")
    assert shots.write_kept(tmp_path / "asked.parquet", tmp_path / "traces.parquet") == 1
    (problem,) = load_problems(tmp_path / "traces.parquet")
    assert problem.prompt == "2+3?" and len(problem.traces) == 1 and problem.traces[0].messages[0].tool_calls


@pytest.mark.parametrize(
    ("calls", "faults", "valid"),
    [(0, [], False), (1, [], True), (1, ["raised"], False), (2, ["raised"], True), (1, ["unreadable_call"], True)],
)
def test_a_valid_call_has_a_result(calls, faults, valid):
    assert has_valid_call({"calls": calls, "faults": faults}) is valid
