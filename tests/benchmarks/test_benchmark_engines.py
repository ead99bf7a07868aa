"""The benchmark of the engines runs where there is no GPU, on a model of a few thousand weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engines.py"
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip
SIZES = ["--prompts", "3", "--samples", "2", "--prompt-tokens", "20", "--new-tokens", "12", "--repeats", "2"]


def compare_engines(tmp_path, engines, *more):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--engines", engines, "--shape", json.dumps(SHAPE), "--dtype", "float32"]
    done = subprocess.run(
        [*command, *SIZES, "--json", str(out), *more], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(out.read_text())


def check_row(row):
    assert row["tokens_per_second"] > 0 and row["peak_gib"] > 0.05
    assert 0 <= row["diff_mean"] <= row["diff_max"] < 1e-4 and row["diff_mean_after"] < 1e-4


@pytest.mark.slow
def test_one_engine_makes_one_row(tmp_path):
    shown, (row,) = compare_engines(tmp_path, "native")
    check_row(row)
    assert "3 prompts x 2 samples, 20 + 12 tokens, float32, median of 2" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("| native ")]
    assert line.count("|") == 13 and " - |" in line  # it neither sleeps nor pushes


@pytest.mark.vllm
def test_both_engines_share_one_table(tmp_path):
    arguments = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    shown, rows = compare_engines(tmp_path, "native,vllm", "--vllm-args", json.dumps(arguments))
    assert [row["engine"] for row in rows] == ["native", "vllm"]
    for row in rows:
        check_row(row)
    assert rows[1]["push_s"] > 0 and rows[1]["wake_s"] >= 0 and "vllm 0." in shown
