"""The benchmarks measure what they say, and say when they cannot."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from bench import step
from bench.kernels import top_kernels
from bench.lengths import Lognormal, waiting_seconds
from bench.limits import Response, limit_memory, roofline_seconds, update_flops
from bench.models import random_model
from bench.rollout import RolloutRun
from bench.update import checkpointing_knob, trained_model, update_config
from typer.testing import CliRunner

from benchmarks.speed import _as_shown
from luffy.cli import app
from luffy.errors import UserError
from luffy.models.four_bit import FourBitLinear
from luffy.models.machine import Machine


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
    assert rows[0]["quantize_s"] is None


@pytest.mark.gpu
def test_rollouts_in_fp8_say_what_their_copies_take(tmp_path):
    out = tmp_path / "rollout.json"
    sizes = ["--shape", "30m", "--runs", "4x8x8", "--repeats", 1, "--json", out]
    assert "fp8 copy" in bench("rollout", "--precision", "fp8", *sizes)
    (row,) = json.loads(out.read_text())["rows"]
    assert 0 < row["quantize_s"] < row["seconds"]
    assert "fp8 copy" not in bench("rollout", *sizes)


def test_an_update_reports_its_work(tmp_path):
    out = tmp_path / "update.json"
    sizes = ["--samples", 3, "--group", 2, "--prompt-tokens", 3, "--response-tokens", 5]
    bench("update", *sizes, "--repeats", 1, "--json", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tokens"] == 3 * 8 and row["computed_tokens"] == (3 + 2 * 5) + (
        3 + 5
    )  # two of one prompt, one of another
    assert row["mfu"] > 0 and row["checkpointing"] is False and "kernels" not in row


@pytest.mark.parametrize("more", [["--checkpointing", "true", "--offload"], ["--lora", 4]])
def test_a_step_reports_its_work(tmp_path, more):
    out = tmp_path / "step.json"
    sizes = ["--problems", 2, "--samples", 2, "--prompt-tokens", 4, "--new-tokens", 3]
    text = bench("step", *sizes, "--repeats", 1, "--device", "cpu", *more, "--json", out)
    assert all(name in text for name in ("MFU", "of roofline", "outside", "GPU idle"))
    written = json.loads(out.read_text())
    (row,), machine = written["rows"], Machine(**written["machine"])
    assert (row["new_tokens"], row["update_tokens"]) == (2 * 2 * 3, 2 * 2 * 7)  # no response ends early
    assert row["computed_tokens"] == row["update_tokens"] - 2 * 4  # the prompts of two samples
    phases, model = row["phases"], random_model("tiny", "float32", "cpu")
    assert {"plan", "rollout", "reward", "pack", "update"} <= phases.keys() and "step" not in phases
    spent = phases["rollout"] + phases["update"] + phases["old_log_probs"]
    assert row["outside"] == pytest.approx(1 - spent / row["seconds"]) and 0 < row["outside"] < 1
    assert row["update_tokens_per_second"] == pytest.approx(28 / (phases["update"] + phases["pack"]))
    if "--lora" not in more:
        limit = roofline_seconds(model, [Response(4, 3)] * 4, machine, slots=64)
        assert row["roofline_share"] == pytest.approx(limit / phases["rollout"])
        per_second = update_flops(model, 20) / (phases["update"] + phases["pack"])
        assert row["mfu"] == pytest.approx(per_second / machine.flops)


def test_four_bits_count_as_the_weights_they_stand_for(tmp_path):
    pytest.importorskip("bitsandbytes")
    flops = []
    for quantize in ([], ["--quantize", "nf4"]):
        out = tmp_path / "update.json"
        bench("update", "--repeats", 1, "--device", "cpu", "--lora", 4, *quantize, "--json", out)
        written = json.loads(out.read_text())
        (row,) = written["rows"]
        flops.append(row["mfu"] * row["seconds"] * written["machine"]["flops"])
    assert flops[0] == pytest.approx(flops[1])


def test_what_is_updated_has_adapters_on_four_bits():
    pytest.importorskip("bitsandbytes")
    cfg = update_config(512, 8, "auto", False, 4, "nf4", "float32", "cpu")
    model = trained_model("tiny", None, cfg, "cpu")
    assert any(isinstance(module, FourBitLinear) for module in model.modules())
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_a_limit_of_memory_is_in_gib_and_at_most_all(monkeypatch):
    limits = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    for gib in (24, None, 141):
        limit_memory("cuda", gib)
    assert limits == [0.3, 1.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--quantize", "nf4"], "give --lora too"), (["--memory", 24, "--device", "cpu"], "and this is a CPU")],
)
def test_what_cannot_be_limited_or_quantized_is_refused(words, message):
    for what in ("update", "step"):
        result = CliRunner().invoke(app, ["bench", what, *map(str, words)])
        assert result.exit_code != 0 and message in str(result.exception)


@pytest.mark.slow
def test_adapters_have_gradients_and_the_rest_does_not(tmp_path):
    flops = {}
    for rank in (0, 4):
        out = tmp_path / f"{rank}.json"
        bench("step", "--repeats", 1, "--device", "cpu", "--lora", rank, "--json", out)
        written = json.loads(out.read_text())
        (row,) = written["rows"]
        seconds = row["phases"]["update"] + row["phases"]["pack"]
        flops[rank] = row["mfu"] * seconds * written["machine"]["flops"] / row["computed_tokens"]
    weights = sum(p.numel() for p in random_model("tiny", "float32", "cpu").parameters())
    assert flops[0] == pytest.approx(6 * weights)
    assert 4 * weights < flops[4] < 6 * weights


def test_a_separate_embedding_is_only_looked_up():
    model = random_model("tiny", "float32", "cpu")
    weights = sum(p.numel() for p in model.parameters())
    assert update_flops(model, 10) == 60 * weights
    model.config.tie_word_embeddings = False  # as if the same number of parameters held an embedding of its own
    assert update_flops(model, 10) == 60 * (weights - 512 * 64)
    model.requires_grad_(False)
    assert update_flops(model, 10) == 40 * (weights - 512 * 64)


def test_kernels_are_named_with_their_shares(tmp_path):
    out = tmp_path / "kernels.json"
    assert "aten::mm" in bench(
        "rollout", "--runs", "2x5x6", "--repeats", 1, "--device", "cpu", "--kernels", "--json", out
    )
    (row,) = json.loads(out.read_text())["rows"]
    assert len(row["kernels"]) == 12 and sum(k["share"] for k in row["kernels"]) < 1
    assert row["new_tokens"] == 6 and row["decode_steps"] == 5  # the profiled call is not the timed one
    sizes = ["--samples", 3, "--prompt-tokens", 3, "--response-tokens", 5]
    assert "aten::mm" in bench("update", *sizes, "--repeats", 1, "--device", "cpu", "--kernels")


def test_a_kernel_counts_without_what_it_calls():
    a = torch.randn(700, 700)  # large beside what calls it, on a busy machine too

    def work():
        with torch.profiler.record_function("a region"):
            for _ in range(5):
                torch.nn.functional.linear(a, a)

    rows = top_kernels(work, torch.device("cpu"))
    assert rows[0]["kernel"] == "aten::mm" and rows[0]["calls"] == 5 and rows[0]["share"] > 0.5
    assert "a region" not in [row["kernel"] for row in rows]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert [row["kernel"] for row in top_kernels(work, torch.device("cpu"), count=1)] == ["aten::mm"]


def test_the_roofline_is_bytes_over_bandwidth():
    model = random_model("tiny", "float32", "cpu")
    weights = sum(p.numel() for p in model.parameters()) * 4
    machine = Machine("made up", 1.0, bandwidth=1000.0)
    per_token = 2 * 2 * 2 * 16 * 4
    even, cached = [Response(10, 3)] * 6, 6 * (11 + 12)
    assert roofline_seconds(model, even, machine, 100) == pytest.approx((2 * weights + cached * per_token) / 1000)
    assert roofline_seconds(model, even, machine, 4) == pytest.approx((4 * weights + cached * per_token) / 1000)
    uneven, cached = [Response(10, 2), Response(5, 1), Response(10, 4)], 11 + (11 + 12 + 13)
    assert roofline_seconds(model, uneven, machine, 2) == pytest.approx((3 * weights + cached * per_token) / 1000)
    assert roofline_seconds(model, uneven, machine, 1) == pytest.approx((4 * weights + cached * per_token) / 1000)
    model.config.tie_word_embeddings = False  # as if an embedding of its own were among the same parameters
    read = weights - 512 * 64 * 4
    assert roofline_seconds(model, uneven, machine, 1) == pytest.approx((4 * read + cached * per_token) / 1000)
    assert roofline_seconds(model, [], machine, 1) == 0


def test_the_roofline_of_four_bits_reads_half_a_byte_a_weight():
    pytest.importorskip("bitsandbytes")
    full, four = (
        trained_model("tiny", None, update_config(512, 8, "auto", False, 4, kind, "float32", "cpu"), "cpu")
        for kind in ("", "nf4")
    )
    quantized = sum(math.prod(p.quant_state.shape) for p in four.parameters() if hasattr(p, "quant_state"))
    machine = Machine("made up", 1.0, bandwidth=1000.0)
    spared = roofline_seconds(full, [Response(4, 2)], machine, 1) - roofline_seconds(four, [Response(4, 2)], machine, 1)
    assert spared * 1000 == pytest.approx((4 - 0.5) * quantized) and quantized > 0


def test_overlapping_kernels_count_once():
    assert step.covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert step.covered([]) == 0


def test_the_share_without_a_kernel_from_below_and_from_above(monkeypatch):
    span = SimpleNamespace(time_range=SimpleNamespace(start=0.0, end=6e6))
    monkeypatch.setattr(step, "profiled", lambda work, device: work() or [span])
    share = step._idle_share(lambda: 10.0, 8.0, torch.device("cpu"))
    assert share == (pytest.approx(0.25), pytest.approx(0.4))
    lowest, highest = (step._idle_share(lambda: 10.0, seconds, torch.device("cpu")) for seconds in (5.0, 14.0))
    assert lowest[0] == 0 and highest[0] == highest[1]
    assert _as_shown({"gpu_idle_share": share})["gpu_idle_share"] == "25.0% to 40.0%"


def test_bad_input_is_named():
    with pytest.raises(UserError, match="PROMPTSx"):
        RolloutRun.parse("64")
    for text in ("0x4x4", "4x0x4", "4x4x-1"):
        with pytest.raises(UserError, match=f"run '{text}' has a number below 1"):
            RolloutRun.parse(text)
    with pytest.raises(UserError, match="shape 'huge'"):
        random_model("huge", "float32", "cpu")
    with pytest.raises(UserError, match="auto, true or false"):
        checkpointing_knob("yes")


def test_steps_of_unequal_lengths_tell_how_long_they_wait(tmp_path):
    out = tmp_path / "lengths.json"
    sizes = ["--problems", 6, "--samples", 2, "--prompt-tokens", 4, "--new-tokens", 24, "--median", 6]
    sizes += ["--max-tokens-per-step", 8, "--repeats", 2, "--device", "cpu", "--threads", 1]
    text = bench("step", "--lengths", "lognormal", *sizes, "--json", out)
    assert all(name in text for name in ("max_tokens_per_step", "waiting", "GPU busy", "oldest"))
    whole, parts = json.loads(out.read_text())["rows"]
    assert whole["max_tokens_per_step"] is None and whole["groups"] == 6 and whole["oldest"] == 0
    assert parts["max_tokens_per_step"] == 8 and 0 < parts["oldest"] <= 2  # it begins as after many steps
    for row in (whole, parts):
        seconds, waiting = (sum(step[name] for step in row["steps"]) for name in ("seconds", "waiting_seconds"))
        outside = sum(step["outside"] * step["seconds"] for step in row["steps"])
        assert row["seconds"] == pytest.approx(seconds / 2) and len(row["steps"]) == 2
        assert row["waiting_share"] == pytest.approx(waiting / 2 / row["rollout"])
        assert row["gpu_busy_share"] == pytest.approx(1 - (waiting + outside) / seconds)
    assert 0 < whole["waiting_share"] < 1
    bench("step", "--lengths", "lognormal", *sizes, "--max-tokens-per-step", 0, "--no-warm-up", "--json", out)
    (alone,) = json.loads(out.read_text())["rows"]
    assert alone["max_tokens_per_step"] is None and len(alone["steps"]) == 2
    assert alone["steps"][0]["new_tokens"] != alone["steps"][1]["new_tokens"] == whole["steps"][0]["new_tokens"]


def test_what_is_drawn_is_lognormal_and_waiting_is_for_the_last():
    lengths = Lognormal(median=800, sigma=1.0, most=8192)
    drawn = sorted(lengths.draw(seed) for seed in range(4000))
    assert drawn[2000] == pytest.approx(800, rel=0.06) and drawn[0] >= 1 and drawn[-1] == 8192
    assert sum(n < 800 * math.e for n in drawn) / 4000 == pytest.approx(0.8413, abs=0.02)
    assert lengths.draw(7) == lengths.draw(7)
    ended = [1.0, 2.0, 3.0, 5.0]
    assert waiting_seconds(ended, few=2) == 2.0  # one is left from second 3 to 5
    assert waiting_seconds(ended, few=2.5) == 3.0
    assert waiting_seconds(ended, few=1) == 0.0 and waiting_seconds(ended, few=9) == 5.0


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--lengths", "even"], "equal or lognormal"), (["--lengths", "lognormal", "--profile"], "kernel")],
)
def test_lengths_that_cannot_be_measured_are_refused(more, message):
    result = CliRunner().invoke(app, ["bench", "step", "--device", "cpu", *more])
    assert isinstance(result.exception, UserError) and message in str(result.exception)
