"""The comparison keeps its rows when a system fails, says so by its exit code, and ends with the ratio."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vs_peers.py"
SMALL = ["--shape", "tiny", "--problems", "2", "--samples", "2", "--prompt-tokens", "4", "--new-tokens", "6",
         "--device", "cpu", "--dtype", "float32"]  # fmt: skip


@pytest.fixture
def peers():
    spec = importlib.util.spec_from_file_location("vs_peers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_times(step):
    return {"step": step, "generate_and_score": step / 2, "peak_gib": None}


@pytest.mark.parametrize(
    ("results", "code", "last"),
    [
        ({"luffy": step_times(2.0), "luffy-auto": step_times(1.5), "trl": step_times(6.0)}, 0,
         "whole step: luffy-auto / luffy = 0.75, trl / luffy = 3.00"),
        ({"luffy": step_times(2.0), "trl": {"failed": "exit code 1"}, "trl-vllm": step_times(5.0)}, 1,
         "whole step: trl-vllm / luffy = 2.50"),
        ({"luffy": {"failed": "exit code 1"}, "trl": step_times(5.0)}, 1,
         "whole step: no ratio without luffy and another system"),
    ],
)  # fmt: skip
def test_every_system_has_a_row_and_a_failure_is_told(peers, monkeypatch, capsys, results, code, last):
    monkeypatch.setattr(peers, "in_its_own_process", lambda args, system, inputs: results[system])
    assert peers.main([*SMALL, "--systems", ",".join(results)]) == code
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == last
    assert [line.split()[0] for line in shown[-1 - len(results) : -1]] == list(results)
    assert sum("failed: exit code 1" in line for line in shown) == code


def test_our_side_answers_in_full(peers, tmp_path, capsys):
    from bench.step import write_inputs

    write_inputs(tmp_path, "tiny", "float32", "cpu", problems=6, prompt_tokens=4)
    assert peers.main([*SMALL, "--one", "luffy-auto", "--inputs", str(tmp_path)]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("FIGURES "))
    assert row["new_tokens"] == 2 * 2 * 6 and row["step"] == row["seconds"]
    assert 0 < row["generate_and_score"] < row["step"] - row["phases"]["update"]


@pytest.mark.slow
def test_a_system_that_is_not_there_fails_alone(peers, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "trl.py").write_text("raise ImportError('no TRL here')\n")
    (tmp_path / "datasets.py").write_text("Dataset = None\n")
    result = peers.in_its_own_process(peers.options([*SMALL]), "trl", str(tmp_path))
    assert result == {"failed": "exit code 1"} and "no TRL here" in capsys.readouterr().out
