"""What `--dry-run` says: bytes counted by hand, and what it finds wrong."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
from builders import write_rows
from torch.utils._python_dispatch import TorchDispatchMode

from luffy.config import EnvironmentConfig
from luffy.dry_run import check, dry_run, first_step, times
from luffy.dry_run.cost import Gpu, Model, StepPlan
from luffy.dry_run.lines import engine_line
from luffy.dry_run.memory import Work, kept_parts, memory_needs
from luffy.dry_run.models import OtherModels, model_shape
from luffy.dry_run.times import gathers_once
from luffy.errors import UserError
from luffy.rollout.native import NativeEngine
from luffy.step import training_step
from luffy.step.draws import draw, plan
from luffy.train import build
from luffy.train.loop import Trainer
from luffy.types import Score

DISTILL = {"credit": "distill", "reject_extreme": False}


@pytest.fixture(autouse=True)
def small_trial(monkeypatch):
    """Of the machine's speed: fewer tokens than in earnest."""
    monkeypatch.setattr(times, "PROBED_TOKENS", times.FEWEST_TOKENS)
    monkeypatch.setattr(times, "FEWEST_SLOTS", 4)


def line_of(cfg, name, method="rl"):
    return next(line for line in dry_run(cfg, method) if line.startswith(name))


def memory_of_line(text):
    """``{"weights": 0.5, ...}`` of a line of memory, and its peak."""
    parts = re.search(r"in the [\w ]+: (.*?) GiB", text)[1]
    return {name: float(size) for name, size in re.findall(r"([a-zA-Z' ]+?) ([\d.]+)(?:, |$)", parts)}


def test_the_parts_add_up_and_the_machine_is_named(make_config):
    for method in ("rl", "sft"):
        said = line_of(make_config(), "memory", method)
        peak = float(re.search(r"about ([\d.]+) GiB at the peak, in the update:", said)[1])
        assert sum(memory_of_line(said).values()) == pytest.approx(peak, abs=0.04), said
        assert re.search(r"this (machine|container) has [\d.]+ GiB, [\d.]+ free", said)
    assert "; rollout " in line_of(make_config(), "memory")


def test_the_time_of_a_step_and_of_the_run(make_config):
    said = line_of(make_config(), "time")
    assert re.match(r"time       roughly [\d.e-]+ \w+ a step \(rollout [\d.e-]+ \w+, update [\d.e-]+ \w+\), ", said), (
        said
    )
    assert "for 4 steps" in said and "tried with two layers of the model on this machine" in said
    assert "(update alone)" in line_of(make_config(), "time", "sft")


def test_the_first_traces_are_verified(make_config, sums, tmp_path, monkeypatch):
    rows = sorted(map(json.loads, sums.read_text().splitlines()), key=lambda row: bool(row["traces"]))
    assert not rows[0]["traces"] and sum(bool(row["traces"]) for row in rows) == 16

    def said(wrong, method="rl", n_prefix=1):
        made = [{**row, "answer": "777"} if i < wrong else row for i, row in enumerate(reversed(rows))]
        path = tmp_path / f"wrong-{wrong}.jsonl"
        write_rows(path, reversed(made))
        cfg = make_config(data={"train": str(path), "eval": str(sums)}, guidance={"n_prefix": n_prefix})
        return next(line for line in dry_run(cfg, method) if line.startswith("traces"))

    assert said(wrong=3) == "traces     13 of the first 16 are correct by reward numeric"
    assert said(wrong=4).endswith("12 of the first 16 are correct by reward numeric; CHECK THEM: only correct traces help "
                                  "(luffy prepare check)")  # fmt: skip
    assert said(wrong=4, n_prefix=0) == "traces     not used"
    assert said(wrong=4, method="sft") == "traces     not verified: SFT learns from all of them"
    monkeypatch.setattr(first_step, "PROBLEMS_LOOKED_AT", 1)
    assert said(wrong=0) == "traces     none with the first 1 problems"


def test_traces_that_could_not_be_scored_are_not_blamed(make_config, monkeypatch):
    score = first_step.verified
    monkeypatch.setattr(first_step, "verified", lambda *args: [Score(0.0, "error"), *score(*args)[1:]])
    said = line_of(make_config(), "traces")
    assert said.endswith("15 of the first 16 are correct by reward numeric; 1 COULD NOT BE SCORED: look at the reward "
                         "(luffy verify)")  # fmt: skip
    monkeypatch.setattr(first_step, "verified", lambda *args: [Score(0.5) for _ in args[0]])
    said = line_of(make_config(), "traces")
    assert said.endswith(
        "0 of the first 16 are correct by reward numeric; THE BEST SCORE IS 0.5, below reward.success=1"
    )


def test_the_update_has_the_loss_of_its_method(make_config):
    cfg = make_config(algorithm={"sft_reshape": "p_div_p_0.2", "off_policy_reshape": "p_div_p_0.3"})
    assert line_of(cfg, "update", "sft").endswith(", p_div_p (gamma 0.2), token-mean")
    assert "p_div_p (gamma 0.3)" in line_of(cfg, "update") and "0.2" not in line_of(cfg, "update")


def test_a_price_needs_a_gpu(make_config):
    cfg = make_config(model={"device": "cpu"})
    with pytest.raises(UserError, match="name one with --gpu"):
        dry_run(cfg, "rl", price=2.0)
    assert any("at 2 an hour" in line for line in dry_run(cfg, "rl", gpu="h200", price=2.0))


@pytest.mark.parametrize("changes", [
    {"guidance": {"n_prefix": 0, "gate": "hinted_group"}},
    {"guidance": {"n_prefix": 0}, "algorithm": DISTILL, "teacher": {"path": "self", "shown": "solution"}},
])  # fmt: skip
def test_traces_that_are_shown_are_verified(make_config, changes):
    assert line_of(make_config(**changes), "traces") == "traces     16 of the first 16 are correct by reward numeric"


def test_a_cpu_without_bfloat16_is_told_to_use_float32(make_config, tiny_model, monkeypatch):
    def warned(fast, **changes):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
        return [line for line in dry_run(make_config(**changes), "rl") if line.startswith("warning")]

    half = {"model": {"path": str(tiny_model), "device": "cpu", "dtype": "bfloat16"}}
    (line,) = warned(False, **half)
    assert line.endswith("bfloat16 instructions and takes many times longer with it: use float32")
    assert warned(True, **half) == warned(False) == []


class Products(TorchDispatchMode):
    """Collects the dtypes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.dtypes.add(result.dtype)
        return result


@pytest.mark.parametrize(("dtype", "gpu", "kinds"), [
    ("float32", None, {"time"}), ("bfloat16", None, {"time", "warning"}), ("bfloat16", "h200", {"cost"}),
])  # fmt: skip
def test_nothing_is_tried_in_bfloat16_on_a_cpu_without_it(
    make_config, tiny_model, tmp_path, monkeypatch, dtype, gpu, kinds
):
    """The model's own config says bfloat16, as most on the hub do. A run for another machine is told nothing of this."""
    folder = tmp_path / "half"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    cfg = make_config(model={"path": str(folder), "dtype": dtype})
    with Products() as products:
        lines = dry_run(cfg, "rl", gpu=gpu)
    assert products.dtypes == {torch.float32}
    said = {line.split()[0]: line for line in lines if line.split()[0] in ("time", "cost", "warning")}
    assert said.keys() == kinds
    assert gpu or said["time"].endswith("not tried in bfloat16, which is slow on this CPU") == (dtype == "bfloat16")


def planned_by(cfg, monkeypatch):
    """The plan of a dry run, the work and the requests of which it gives the time, and its line of the step."""
    seen, plan_line = [], check.plan_line

    def keep_plan(cfg, batch, plan):
        seen.append(plan)
        return plan_line(cfg, batch, plan)

    monkeypatch.setattr(check, "plan_line", keep_plan)
    monkeypatch.setattr(times, "time_on_cpu", lambda cfg, work, requests, slots: seen.extend((work, requests)))
    line = line_of(cfg, "step")
    return *seen, line


def first_plan(run):
    return plan(run, draw(run, training_step.begin(run, 0)[0]), 0)


def listed(planned):
    return [[(p.task, p.token_ids.tolist(), p.request) for p in group] for group in planned]


@pytest.mark.parametrize("choice", ["random", "round_robin", "shortest", "best_reward"])
def test_the_plan_is_that_of_the_runs_first_step(make_config, sums, tmp_path, monkeypatch, choice):
    """Prefixes of several traces, of which the second alone is right, end where guidance.cut_at says."""
    path = tmp_path / "several.jsonl"
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    for row in rows:
        row["traces"] = [text for trace in row["traces"] for text in (f"{trace}77", trace, "1+1\n#### 77")]
    write_rows(path, rows)
    cfg = make_config(
        data={"train": str(path)},
        guidance={"n_prefix": 2, "trace_choice": choice, "strategy": "random", "min_ratio": 0.4, "cut_at": ["\n", "="]},
    )
    with Trainer(cfg) as trainer:
        expected = first_plan(trainer.run)
    found, _, requests, _ = planned_by(cfg, monkeypatch)
    assert listed(found) == listed(expected) and requests == [p.request for g in expected for p in g if p.request]
    assert any(p.request and p.prefix for group in found for p in group)


def test_problems_with_a_trace_alone_are_counted(make_config, monkeypatch):
    changes = {"guidance": {"n_prefix": 0}, "algorithm": {"credit": "lone_trace_sft"}}
    cfg = make_config(batch={"problems": 8, "expert_share": 0.25}, **changes)
    with Trainer(cfg) as trainer:
        expected = first_plan(trainer.run)
    found, work, requests, line = planned_by(cfg, monkeypatch)
    assert listed(found) == listed(expected)
    tokens = sum(len(r.prompt_ids) + 16 for r in requests)
    assert line == (
        "step       6 problems x 4 samples and 2 with a trace alone: 24 on-policy, 0 from a trace prefix, 2 whole "
        f"traces; at most {tokens:,} tokens through the engine"
    )
    assert len(requests) == 24 and sum(one.sequences for one in work.every_pass) == 26
    traces = sum(p.prefix for group in found for p in group)
    assert traces > 0 and sum(one.rows for one in work.every_pass) == 24 * 16 + traces


def my_engine(cfg, model, device, warn):
    return NativeEngine(model)


def test_the_engine_and_its_slots(make_config):
    def said(rollout, method="rl", **renting):
        lines = dry_run(make_config(rollout=rollout), method, **renting)
        return next(line for line in lines if line.startswith("engine")).removeprefix("engine").strip()

    assert said({"slots": 24}) == "native, 24 slots"
    assert said({"slots": None}) == said({"slots": None}, "sft") == "native, 256 slots"
    assert said({"slots": None}, gpu="h200") == "native, 1,024 slots"
    assert said({"engine": "vllm"}).startswith("vLLM, in this process, 24 slots, ")
    assert said({"engine": f"{__name__}:my_engine"}) == f"{__name__}:my_engine, mismatch correction off"


@pytest.mark.parametrize(("at_once", "slots"), [(25, "24 slots"), (23, "23 slots (environment.at_once)")])
def test_a_limit_on_episodes_leaves_slots_empty(make_config, at_once, slots):
    plain, chain = make_config(rollout={"slots": 24}), EnvironmentConfig(name="chain", at_once=at_once)
    cfg = replace(plain, data=replace(plain.data, style="chat"), environment=chain)
    assert engine_line(cfg, "rl", None, on_gpu=False) == f"native, {slots}"


@pytest.mark.parametrize("gpu", [None, "h200"])
def test_the_time_of_an_engine_of_ones_own_is_not_guessed(make_config, monkeypatch, gpu):
    monkeypatch.setattr(times, "duration", repr)

    def said(**rollout):
        return dry_run(make_config(rollout=rollout), "rl", gpu=gpu)[8]

    own, native = said(engine=f"{__name__}:my_engine"), said()
    assert f" a step (update alone: how long rollouts of {__name__}:my_engine take is not known), " in own
    assert "not known" not in native
    if gpu:  # a CPU is measured anew each time
        update = re.search(r", update (.+?)\)", native)[1]
        assert f"H200: {update} a step" in own


def test_the_memory_of_an_engine_of_ones_own_is_not_guessed(make_config):
    def said(method="rl", **rollout):
        return line_of(make_config(rollout=rollout), "memory", method)

    own, native = said(engine=f"{__name__}:my_engine"), said()
    assert "KV cache" not in own and "rollout " not in own
    assert f"; how much rollouts of {__name__}:my_engine need is not known; " in own
    assert "rollout" in native and "rollout" in said(engine="vllm")
    assert "not known" not in native + said(engine="vllm") + said("sft", engine=f"{__name__}:my_engine")


def test_a_batch_larger_than_the_data_is_said(make_config):
    cfg = make_config(batch={"problems": 36})
    said = (
        "batch.problems=36, but only 24 usable: every step takes each about 1.5 times; lower batch.problems or add data"
    )
    assert f"warning    {said}" in dry_run(cfg, "rl")
    with Trainer(cfg) as trainer:
        assert said in trainer.notices
    assert not any("usable: every" in line for line in dry_run(make_config(batch={"problems": 24}), "rl"))


def test_problems_that_are_there_twice_are_said(make_config, sums, tmp_path):
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    copies = [rows[2] | {"id": "c0"}, rows[7] | {"id": "c1", "prompt": f" {rows[7]['prompt']}\n"}]
    train, held_out, other = (tmp_path / f"{name}.jsonl" for name in ("train", "held_out", "other"))
    sets = {train: rows[:10] + copies, held_out: [rows[15], rows[7], rows[2]], other: [rows[15]]}
    for path, some in sets.items():
        write_rows(path, some)
    data = {"train": str(train), "eval": str(held_out), "eval_also": {"other": str(other), "same": str(train)}}
    cfg = make_config(data=data)
    said = [
        f"2 of 12 training problems repeat an earlier one, first: {train}:11 = {train}:3",
        f"2 of 3 held-out problems (data.eval) are in the training set too, first: {held_out}:2 = {train}:8",
        f"12 of 12 held-out problems (data.eval_also.same) are in the training set too, first: {train}:1 = {train}:1",
    ]
    assert [line for line in dry_run(cfg, "rl") if line.startswith("warning")] == [f"warning    {s}" for s in said]
    with Trainer(cfg) as trainer:
        assert trainer.notices == said


def test_chats_with_several_assistant_turns_are_said(make_config, sums, tmp_path):
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["traces"][0]}]}
        | {"answer": row["answer"]}
        for row in rows
        if row["traces"]
    ]
    chats[2]["messages"] += chats[3]["messages"]
    path = tmp_path / "chats.jsonl"
    write_rows(path, chats)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    cfg = make_config(data={"train": str(path), "style": "chat", "chat_template": template, "max_prompt_tokens": 64})
    said = f"1 of {len(chats)} problems are chats with several assistant turns, first: {path}:3; only the last turn"
    assert any(line.startswith(f"warning    {said}") for line in dry_run(cfg, "rl"))
    with Trainer(cfg) as trainer:
        assert any(line.startswith(said) for line in trainer.notices)


def test_traces_are_verified_without_the_token_that_ends_them(make_config):
    cfg = make_config(reward={"kind": "loop_rewards:ends_in_a_digit"})
    assert any(line.startswith("traces     16 of the first 16 are correct") for line in dry_run(cfg, "rl"))


def test_a_guidance_model_that_is_not_there(make_config):
    cfg = make_config(rollout={"offpolicy_guidance": {"model_path": "/nowhere"}})
    with pytest.raises(UserError, match=r"'rollout\.offpolicy_guidance\.model_path' /nowhere: no such folder"):
        dry_run(cfg, "rl")


@pytest.mark.parametrize(("method", "knob"), [
    ("rl", "algorithm.off_policy_reshape"), ("rl", "algorithm.sft_reshape"), ("rl", "guidance.strategy"),
    ("sft", "algorithm.off_policy_reshape"), ("sft", "algorithm.sft_reshape"), ("rl", "algorithm.credit"),
    ("rl", "guidance.gate"), ("rl", "rollout.engine"),
])  # fmt: skip
def test_an_unknown_function_is_an_error_of_its_key_before_weights_are_loaded(make_config, monkeypatch, method, knob):
    monkeypatch.setattr(build, "load_weights", None)
    section, key = knob.split(".")
    cfg = make_config(**{section: {key: "nowhere:f"}})
    for begin in (Trainer, dry_run):
        with pytest.raises(UserError, match=rf"^'{knob}': cannot import 'nowhere' for 'nowhere:f': "):
            begin(cfg, method)


OUTSIDE = 2 * 18 * 32  # weights of the tiny model's embeddings and head


def test_the_cost_on_other_gpus_by_hand(make_config):
    """SFT has the tokens of its update alone: 6 FLOPs a weight and token. Two GPUs gather weights twice (those outside
    the layers once), reduce gradients and sync, and each receives half of it. GPU hours are hours times GPUs."""
    cfg = make_config(launch="torchrun", parallel={"workers": 2, "gather": "micro_batch"})
    said = dry_run(cfg, "sft", gpu="a100", price=3.0)
    cost = next(line for line in said if line.startswith("cost"))
    found = re.search(
        r"on 2 x A100: ([\d.e-]+) s a step \(update alone\), ([\d.e-]+) s for 4 steps, "
        r"([\d.e-]+) GPU hours, ([\d.e-]+) at 3 an hour,",
        cost,
    )
    weights = model_shape(cfg).parameters
    tokens = int(re.search(r"traces, up to ([\d,]+) tokens", "".join(said))[1].replace(",", ""))
    passes = math.ceil(tokens / 2 / cfg.batch.tokens)
    computed, moved = 6 * weights * tokens / 2 / (250e12 * 0.65), passes * (8 * weights - 2 * OUTSIDE) / 2 / 300e9
    assert float(found[1]) == pytest.approx(max(computed, moved) + 2 * weights / 2 / 300e9, rel=0.06)  # two digits
    assert float(found[2]) == pytest.approx(4 * float(found[1]), rel=0.12)
    hours = 2 * 4 * float(found[1]) / 3600
    assert float(found[3]) == pytest.approx(hours, rel=0.12) and float(found[4]) == pytest.approx(3 * hours, rel=0.12)


def test_hours_and_prices_have_two_digits_or_all_before_the_point():
    shown = {0.01234: "0.012", 1.26: "1.3", 9.4: "9.4", 12.6: "13", 126.4: "126", 12345.6: "12,346"}
    assert {number: times._rounded(number) for number in shown} == shown


def test_the_cost_counts_every_pass_of_the_update(make_config, tiny_model, tmp_path, monkeypatch):
    """An update takes three forward passes' worth, frozen weights two of them. Reference log-probs take one, and so
    do old ones where all groups need them; those of the second of two mini-batches take half of one. Distillation needs
    old ones and the teacher's, which take as many as the teacher is larger."""
    monkeypatch.setattr(times, "duration", repr)

    def update_of(**changes):
        said = "".join(dry_run(make_config(**changes), "rl", gpu="h200"))
        return float(re.search(r"a step \(rollout .+, update [\d.e-]+ to ([\d.e-]+)\)", said)[1])

    plain = update_of()
    assert 2 / 3 < update_of(model={"lora": {"rank": 4}}) / plain < 1  # attention takes three
    for passes, changes in (
        (4, {"model": {"gradient_checkpointing": True}}),
        (3.5, {"batch": {"mini_batch": 3}}),
        (4, {"algorithm": {"kl_coef": 0.1}}),
        (5, {"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}}),
    ):
        assert update_of(**changes) / plain == pytest.approx(passes / 3), changes
    larger = shutil.copytree(tiny_model, tmp_path / "larger")
    config = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    ratio = model_shape(make_config(model={"path": str(larger)})).parameters / model_shape(make_config()).parameters
    for passes, path in ((1, "self"), (1, str(tiny_model)), (ratio, str(larger))):
        taught = update_of(algorithm=DISTILL, teacher={"path": path}, guidance={"n_prefix": 0})
        assert taught / update_of(guidance={"n_prefix": 0}) == pytest.approx((4 + passes) / 3), path


@pytest.mark.parametrize(
    ("parallel", "shards"),
    [
        ({"workers": 64}, 64),
        ({"workers": 64, "shard": "hybrid"}, 8),
        ({"workers": 4, "shard": "hybrid"}, 4),
        ({"workers": 64, "shard": "hybrid", "shard_size": 16}, 16),
    ],
)
def test_a_copy_of_the_weights_is_sharded_over_all_processes_or_those_of_a_machine(make_config, parallel, shards):
    work = Work(None, 6400, 6400, 4, on_gpu=True, lora_rank=None, checkpointing="auto", passes=[])
    kept = kept_parts(make_config(launch="ray", parallel=parallel), "rl", work, OtherModels())
    assert (kept["weights"], kept["optimizer"]) == (6400 * 4 / shards, 6400 * 8 / shards)


def test_weights_and_gradients_that_stay_gathered_are_counted(make_config):
    """With auto they stay only if there is room."""
    config = model_shape(make_config()).config
    work = Work(config, 6400, 6400, 2, on_gpu=True, lora_rank=None, checkpointing="auto", passes=[])

    def update(gather):
        cfg = make_config(launch="ray", parallel={"workers": 64, "gather": gather})
        return memory_needs(cfg, work, [], OtherModels(), {})["update"]

    assert update("mini_batch")["gathered weights"] == 6400 * 2 and update("mini_batch")["gradients"] == 6400 * 4
    assert update("auto") == update("micro_batch") and "gathered weights" not in update("auto")


def test_which_runs_gather_once(make_config):
    def gathers(**changes):
        cfg = make_config(launch="torchrun", **changes)
        return gathers_once(cfg, StepPlan(Model("", 7.6e9, 28, 3584, 512), 8, 128), Gpu())

    assert gathers() and gathers(parallel={"gather": "mini_batch"})
    assert not gathers(parallel={"gather": "micro_batch"}) and not gathers(parallel={"cpu_offload": True})
    assert not gathers(**{"async": {"max_staleness": 1}})


def test_a_reference_beside_adapters_is_counted_where_one_is_loaded(make_config):
    work = Work(None, 6400, 100, 4, on_gpu=True, lora_rank=4, checkpointing="auto", passes=[])

    def reference(**model):
        return kept_parts(make_config(model=model, algorithm={"kl_coef": 0.1}), "rl", work, OtherModels()).get(
            "reference"
        )

    assert reference(lora={"rank": 4}) is None
    assert reference(lora={"rank": 4}, reference="other") == reference() == 6400 * 4


@pytest.mark.parametrize("loss", [{"mismatch_correction": "masked", "entropy_coef": 0.0}, {"all_max_clip": 0.01}])
def test_what_the_loss_masks_does_not_count_against_the_model(make_config, loss):
    assert dry_run(make_config(algorithm=loss), "rl")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_a_run_on_a_gpu_that_is_named_needs_none_here(make_config):
    cfg = make_config(model={"device": "cuda"})
    assert any("a rented H200" in line for line in dry_run(cfg, "rl", gpu="h200"))
    with pytest.raises(UserError, match="torch sees no GPU"):
        dry_run(cfg, "rl")


def test_several_gpus_are_estimated_where_there_is_none(make_config):
    """A run of several processes on a CPU that is not meant for it: by the cost model, and no CPU is tried."""
    lines = dry_run(make_config(launch="torchrun", parallel={"workers": 8}, model={"device": "auto"}), "rl")
    gpu = "GPU of this machine" if torch.cuda.is_available() else "H200"
    (said,) = (line for line in lines if line.startswith(("time", "cost")))
    assert said.startswith(f"cost       on 8 x {gpu}: ")
    assert "cost" not in [line.split()[0] for line in dry_run(make_config(), "rl") if line]
    assert any("a rented H200 has 139.7 GiB" in line for line in lines) or torch.cuda.is_available()
    warned = [line for line in lines if line.startswith("warning    this machine has no GPU")]
    assert len(warned) == (0 if torch.cuda.is_available() else 1)
    with pytest.raises(UserError, match="--gpu b9: the cost model knows h200, h100, a100"):
        dry_run(make_config(), "sft", gpu="b9")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU says so")
@pytest.mark.parametrize(
    ("launch", "device", "said"),
    [
        ("torchrun", "auto", "8 x H200, and a run started here would train on the CPU in 8 processes"),
        ("torchrun", "cuda", "8 x H200, and a run started here would end with an error"),
        ("ray", "auto", "8 x H200, and Ray needs nodes that have one"),
    ],
)
def test_several_processes_without_a_gpu_are_told_that_there_is_none(make_config, launch, device, said):
    cfg = make_config(launch=launch, parallel={"workers": 8}, model={"device": device})
    (warned,) = (line for line in dry_run(cfg, "rl") if line.startswith("warning    this machine has no GPU"))
    assert said in warned and "--gpu" in warned
    assert not any("has no GPU" in line for line in dry_run(cfg, "rl", gpu="h100"))
