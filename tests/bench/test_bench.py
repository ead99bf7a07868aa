"""The benchmarks measure what they say, and say when they cannot."""

import json

import pytest
from typer.testing import CliRunner

from luffy.bench.machine import Machine
from luffy.bench.rollout import RolloutRun, roofline_seconds
from luffy.bench.shapes import random_model
from luffy.bench.step import covered
from luffy.bench.update import checkpointing_knob
from luffy.cli import app
from luffy.errors import UserError


def bench(*arguments):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_rollout_counts_every_token(tmp_path):
    out = tmp_path / "deep" / "rollout.json"
    text = bench("rollout", "--runs", "2x5x6,3x4x1", "--samples", 2, "--repeats", 1, "--threads", 1, "--json", out)
    assert "tokens/s" in text
    rows = json.loads(out.read_text())["rows"]
    assert [(r["prompts"], r["samples"], r["new_tokens"], r["decode_steps"]) for r in rows] == [
        (2, 2, 6, 5),
        (3, 2, 1, 0),
    ]
    assert rows[0]["tokens_per_second"] == pytest.approx(2 * 2 * 6 / rows[0]["seconds"])


def test_update_and_step_report_their_work(tmp_path):
    out = tmp_path / "update.json"
    sizes = ["--samples", 3, "--group", 2, "--prompt-tokens", 3, "--response-tokens", 5]
    bench("update", *sizes, "--repeats", 1, "--json", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tokens"] == 3 * 8 and row["computed_tokens"] == (3 + 2 * 5) + (
        3 + 5
    )  # two of one prompt, one of another
    assert row["mfu"] > 0 and row["checkpointing"] is False
    out = tmp_path / "step.json"
    bench("step", "--problems", 2, "--samples", 2, "--prompt-tokens", 4, "--new-tokens", 3, "--repeats", 1,
          "--checkpointing", "true", "--json", out)  # fmt: skip
    (row,) = json.loads(out.read_text())["rows"]
    assert row["computed_tokens"] == row["update_tokens"] - 2 * 4  # the prompts of two samples
    assert row["update_tokens"] <= 2 * 2 * 7 and {"rollout", "update", "reward", "plan"} <= row["phases"].keys()
    assert 0 <= row["host_share"] < 1


def test_the_roofline_is_bytes_over_bandwidth():
    model = random_model("tiny", "float32", "cpu")
    weights = sum(p.numel() for p in model.parameters()) * 4
    machine = Machine("made up", 1.0, bandwidth=1000.0)
    per_token = 2 * 2 * 2 * 16 * 4
    run = RolloutRun(prompts=3, prompt_tokens=10, new_tokens=3, samples=2)
    cached = 6 * (11 + 12)
    assert roofline_seconds(model, run, machine, 100) == pytest.approx((2 * weights + cached * per_token) / 1000)
    assert roofline_seconds(model, run, machine, 4) == pytest.approx((4 * weights + cached * per_token) / 1000)


def test_overlapping_kernels_count_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert covered([]) == 0


def test_bad_input_is_named():
    with pytest.raises(UserError, match="PROMPTSx"):
        RolloutRun.parse("64")
    with pytest.raises(UserError, match="shape 'huge'"):
        random_model("huge", "float32", "cpu")
    with pytest.raises(UserError, match="auto, true or false"):
        checkpointing_knob("yes")
