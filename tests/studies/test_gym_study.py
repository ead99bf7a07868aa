"""The testbeds on generated problems: programs that solve them step by step, and accuracy by family."""

import importlib.util
import json

import pytest

from luffy.data import load_problems
from studies.gym import accuracy, traces

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None


@pytest.mark.parametrize(
    ("family", "known", "answer"),
    [
        ("products", {"expression": "5179 * 2931"}, "15179649"),
        ("products", {"expression": "90 * 70"}, "6300"),
        ("chain_sum", {"expression": "2058756 - 5279348 + 2978347 + 9312021 - 8541208 + 8922960"}, "9451528"),
        ("chain_sum", {"expression": "5 - 1000 + 17"}, "-978"),
        ("chain_sum", {"expression": "1000 - 1000"}, "0"),
        ("base_conversion", {"source_base": 11, "target_base": 15, "source_repr": "a3404"}, "2ea96"),
        ("base_conversion", {"source_base": 2, "target_base": 3, "source_repr": "0"}, "0"),
        ("count_bits", {"number": 289545018}, "12"),
    ],
)
def test_a_program_solves_step_by_step(family, known, answer):
    steps, found = traces.FAMILIES[family].solve(known)
    assert found == answer and len(steps) >= 2
    text = traces.trace_of(family, json.dumps({"metadata": known}))
    assert text.endswith(f"\n<answer>{answer}</answer>") and text.count("\n") == len(steps)


def test_every_step_of_a_multiplication_is_right():
    steps, _ = traces.products({"expression": "4087 * 905"})
    sums = [step.partition(":")[0].partition(",")[0].partition("=") for step in steps if "=" in step]
    assert len(sums) > 20
    assert [left for left, _, right in sums if eval(left) != int(right)] == []


def test_accuracy_is_told_by_family():
    items = [{"id": f"{family}#{n}", "right": right} for family, n, right in
             (("a", 0, True), ("a", 0, False), ("a", 1, False), ("a", 1, False), ("b:x=1", 0, True))]  # fmt: skip
    assert accuracy.by_family(items) == {
        "a": {"pass@1": 0.25, "pass@k": 0.5, "problems": 2},
        "b:x=1": {"pass@1": 1.0, "pass@k": 1.0, "problems": 1},
    }


def test_the_widest_gap_comes_first(tmp_path):
    for name, values in (("small", (0.1, 0.5, 0.2)), ("large", (0.2, 0.9, 0.0))):
        (tmp_path / name).mkdir()
        table = {family: {"pass@1": value} for family, value in zip("abc", values, strict=True)}
        (tmp_path / name / accuracy.TABLE).write_text(json.dumps(table))
    lines = accuracy.compared(tmp_path / "small", tmp_path / "large")
    assert [line[0] for line in lines] == ["b", "a", "c"] and "gap +40.0%" in lines[0]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="make test-reasoning-gym installs the package")
@pytest.mark.parametrize("family", traces.FAMILIES)
def test_the_familys_scorer_agrees_with_the_program(family, tmp_path, monkeypatch):
    monkeypatch.setenv("LUFFY_CACHE", str(tmp_path / "cache"))
    path = traces.write_traces(family, tmp_path / "rows.jsonl", size=30)
    problems = load_problems(tmp_path / "rows.jsonl")
    assert len(problems) == 30 and all(len(problem.traces) == 1 for problem in problems)
    assert sum(problem.traces[0].text.count("\n") for problem in problems) > 30 * 8
    held_out = {problem.prompt for problem in load_problems(path, "test")}
    assert len(held_out) == 30 and not held_out & {problem.prompt for problem in problems}
