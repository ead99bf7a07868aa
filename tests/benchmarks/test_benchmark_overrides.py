"""The benchmark of token overrides runs, and its figures say what they claim."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overrides.py"
SMALL = ["--draft", "tiny", "--sequences", "4", "--prompt", "5", "--tokens", "9", "--repeats", "1", "--k", "2", "4"]


@pytest.fixture(scope="module")
def benchmark():
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_a_copy_agrees_without_noise_and_less_with_it(benchmark, tmp_path, capsys):
    accepted = {}
    for noise in ("0", "3"):
        out = tmp_path / "deep" / f"{noise}.json"
        benchmark.main([*SMALL, "--second", "copy", "--noise", noise, "--json", str(out)])
        result = json.loads(out.read_text())
        accepted[noise] = [row["accepted_length"] for row in result["rows"][2:]]
        assert [row["engine"] for row in result["rows"]] == [
            "second alone", "draft alone", "speculative, k=2", "speculative, k=4",
        ]  # fmt: skip
        assert all(row["tokens_per_second"] > 0 for row in result["rows"])
        assert result["rows"][0]["against_second"] == 1.0 and result["settings"]["k"] == [2, 4]
        shown = capsys.readouterr().out.splitlines()
        assert shown[-1].startswith("speculative, k=4") and "accepted" in shown[-5]
    assert accepted["0"] == [2.0, 4.0]  # 8 tokens after the first: whole rounds
    assert all(noisy < exact for noisy, exact in zip(accepted["3"], accepted["0"], strict=True))


def test_another_shape_and_rule_on_the_same_tokens(benchmark, tmp_path):
    out = tmp_path / "out.json"
    benchmark.main([*SMALL, "--second", "tiny-large", "--rule", "mixture", "--eps", "1", "--json", str(out)])
    for row in json.loads(out.read_text())["rows"][2:]:
        assert row["override_share"] == 1.0 and row["accepted_length"] == 0.0


def test_the_shapes_are_qwens(benchmark):
    assert vars(benchmark.SHAPES["qwen2-0.5b"]) == {
        "hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "mlp": 4864, "vocabulary": 151_936,
    }  # fmt: skip
    assert vars(benchmark.SHAPES["qwen2-1.5b"]) == {
        "hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "mlp": 8960, "vocabulary": 151_936,
    }  # fmt: skip
