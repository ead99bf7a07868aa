import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builders import make_tokenizer, write_rows
from trainings import train_rows
from transformers import AutoModelForCausalLM

from luffy.config import to_yaml
from luffy.config.knobs import BatchConfig
from luffy.dry_run import dry_run
from luffy.errors import TrainingStopped, UserError
from luffy.learn.activations import out_of_memory_advice
from luffy.learn.credit import credit_function, group_baseline
from luffy.learn.policy import Policy
from luffy.rollout.policy_weights import tensors_of
from luffy.run_folder.changes import changes_of, compare, in_words, measures_otherwise, write_settings
from luffy.run_folder.checkpoint import MANIFEST, Checkpoint, file_entries, files_below, is_card, manifest_text
from luffy.run_folder.console import was_idle
from luffy.run_folder.recorder import read_json_lines
from luffy.run_folder.saved_state import Progress
from luffy.run_folder.trackers import TensorBoardTracker
from luffy.step import training_step
from luffy.step.crediting import needed_log_probs
from luffy.step.run_state import mini_batches
from luffy.step.snapshot import progress_of
from luffy.train import loop
from luffy.train.loop import Trainer
from luffy.train.saving import Saver
from luffy.train.weights import Export, load_policy
from luffy.trainer import Job
from luffy.types import Score


@pytest.fixture(scope="module")
def undisturbed(make_config_in, tmp_path_factory):
    """The rows of four steps in one go, with nothing changed."""
    return train_rows(make_config_in(tmp_path_factory.mktemp("undisturbed"))())


def weights_in(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def newest_model(cfg):
    return max((cfg.folder / "checkpoints").glob("step-*")) / "model"


def test_a_run_leaves_its_record(make_config):
    cfg = make_config(record={"tensorboard": True, "samples_every": 2, "samples": 3})
    rows = train_rows(cfg)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr", "batch/solve_none", "critic/score/mean",
                 "response_length/clip_ratio", "timing_s/rollout", "perf/throughput", "rollout/logprob_diff_max"):  # fmt: skip
        assert all(math.isfinite(r[name]) for r in rows), name
    assert max(r["rollout/logprob_diff_max"] for r in rows) < 1e-4  # engine and trainer see the same weights
    samples = read_json_lines(cfg.folder / "samples.jsonl")
    assert {r["step"] for r in samples} == {1, 2, 4} and len(samples) == 3 * 3 * 4
    guided = [r for r in samples if any(r["off_policy"])]
    assert guided and all(r["reward"] == 1.0 and r["finish"] == "trace" for r in guided)
    assert all(len(r["tokens"]) == len(r["token_ids"]) == len(r["log_probs"]) for r in samples)
    assert list((cfg.folder / "tensorboard").glob("events*"))
    assert (cfg.folder / "config.yaml").read_text().startswith("name: run")
    AutoModelForCausalLM.from_pretrained(newest_model(cfg))


def test_the_same_seed_gives_the_same_run_and_another_does_not(make_config):
    first, again, other = (
        train_rows(make_config(name=n, seed=s, train={"steps": 2})) for n, s in [("a", 1), ("b", 1), ("c", 2)]
    )
    losses = lambda rows: [r["actor/pg_loss"] for r in rows]  # noqa: E731
    assert losses(first) == losses(again) != losses(other)


def test_guidance_off_equals_grpo_in_twenty_lines(make_config):
    """Plain GRPO on the recorded samples, written here with transformers and torch alone."""
    cfg = make_config(
        guidance={"n_prefix": 0},
        algorithm={"reject_extreme": False, "normalize_std": True, "loss_reduction": "token-mean", "entropy_coef": 0.0},
        optim={"lr": 1e-2, "eps": 1e-3},
        train={"steps": 3, "save_every": 3},
        record={"samples": 6, "samples_every": 1},
        reward={"kind": "loop_rewards:length_parity"},
    )
    train_rows(cfg)
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    tokenizer = __import__("transformers").AutoTokenizer.from_pretrained(cfg.model.path)
    rows = read_json_lines(cfg.folder / "samples.jsonl")
    for step in (1, 2, 3):
        batch = [r for r in rows if r["step"] == step]
        assert len(batch) == 24
        tokens = sum(len(r["token_ids"]) for r in batch)
        for r in batch:
            group = torch.tensor([o["reward"] for o in batch if o["problem"] == r["problem"]])
            std = group.std() if group.std() > 0 else torch.tensor(1.0)
            advantage = (r["reward"] - group.mean()) / (std + 1e-6)
            prompt = tokenizer(r["prompt"])["input_ids"]
            ids = torch.tensor(prompt + r["token_ids"])
            log_p = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
            log_p = log_p[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])
            ratio = torch.exp(log_p - log_p.detach())
            (-(advantage * ratio).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ours = weights_in(newest_model(cfg))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=2e-5)


def test_a_problem_without_traces_trains_as_plain_on_policy(make_config, tmp_path, sums):
    bare = tmp_path / "bare.jsonl"
    rows = [json.loads(line) | {"traces": []} for line in sums.read_text().splitlines()]
    mixed = [rows[0] | {"traces": ["5"]}, *rows[1:]]
    write_rows(bare, mixed)
    common = {"algorithm": {"reject_extreme": False}, "record": {"samples": 6}, "train": {"steps": 1}}
    guided = make_config(name="guided", data={"train": str(bare)}, guidance={"n_prefix": 1}, **common)
    plain = make_config(name="plain", data={"train": str(bare)}, guidance={"n_prefix": 0}, **common)
    train_rows(guided), train_rows(plain)
    ours, theirs = (read_json_lines(cfg.folder / "samples.jsonl") for cfg in (guided, plain))
    touched = {r["problem"] for r in ours if any(r["off_policy"])}
    assert touched <= {"p0"}
    same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a["problem"] not in touched]
    assert len(same) >= 20
    for a, b in same:
        assert a["token_ids"] == b["token_ids"] and a["advantages"] == b["advantages"] and a["reward"] == b["reward"]


def test_partial_prefixes_continue_and_are_marked(make_config):
    guidance = {"n_prefix": 2, "strategy": "random", "min_ratio": 0.3, "max_ratio": 0.8}
    cfg = make_config(guidance=guidance, train={"steps": 2})
    train_rows(cfg)
    rows = [r for r in read_json_lines(cfg.folder / "samples.jsonl") if any(r["off_policy"])]
    assert rows
    for r in rows:
        count = sum(r["off_policy"])
        assert r["off_policy"] == [1] * count + [0] * (len(r["token_ids"]) - count) and count < len(r["token_ids"])
        assert 0 < r["prefix_ratio"] < 0.8 and len(r["token_ids"]) <= cfg.rollout.max_tokens


@pytest.mark.parametrize(("choice", "expected"), [("shortest", {"1"}), ("best_reward", {"2#### 2"})])
def test_trace_choices_reach_the_group(make_config, tmp_path, choice, expected):
    data = tmp_path / "two.jsonl"
    row = {"prompt": "1+1", "answer": "2", "traces": ["1", "2#### 2"]}  # the shorter one is wrong
    write_rows(data, (row | {"id": str(i)} for i in range(6)))
    cfg = make_config(
        data={"train": str(data)}, guidance={"trace_choice": choice}, train={"steps": 1},
        algorithm={"reject_extreme": False},
    )  # fmt: skip
    train_rows(cfg)
    rows = read_json_lines(cfg.folder / "samples.jsonl")
    assert {r["response"] for r in rows if all(r["off_policy"])} == expected


def test_mini_batches_after_the_first_use_old_log_probs(make_config, monkeypatch):
    """Those of all groups would change nothing: in the first mini-batch old is current."""
    changes = {"batch": {"mini_batch": 2}, "algorithm": {"remove_clip": False}, "optim": {"lr": 0.02}}
    scored, score = [], Policy.score
    monkeypatch.setattr(Policy, "score", lambda self, samples: scored.append(len(samples)) or score(self, samples))
    cfg = make_config(train={"steps": 2}, **changes)
    rows = train_rows(cfg)
    kept = [cfg.batch.problems - int(row["batch/rejected"]) for row in rows]
    assert min(kept) > 1 and scored == [cfg.rollout.n * (k - k // min(3, k)) for k in kept]
    assert any(abs(r["actor/ppo_kl"]) > 1e-6 for r in rows)  # later mini-batches have left the old policy
    monkeypatch.setattr("luffy.step.crediting.needed_log_probs", lambda cfg, problems: (range(problems), False))
    again = train_rows(make_config(name="all", train={"steps": 2}, **changes))
    for name in ("actor/pg_loss", "actor/ppo_kl", "actor/grad_norm", "actor/entropy_loss"):
        assert [r[name] for r in again] == pytest.approx([r[name] for r in rows], rel=1e-4, abs=1e-7), name


def test_gradients_through_importance_weights_flow_in_all_mini_batches_or_in_none(make_config):
    """They flow where old is current."""
    for size, groups in ((6, range(6, 6)), (2, range(6))):
        cfg = make_config(batch={"mini_batch": size}, algorithm={"importance_detach": False})
        assert needed_log_probs(cfg, 6) == (groups, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": {"mini_batch": 2}}, "with 3 mini-batches a step .* set batch.mini_batch=6 for one mini-batch"),
        ({"batch": {"mini_batch": 6}}, None),
        ({}, None),
        ({"batch": {"mini_batch": 2}, "algorithm": {}}, None),
        ({"async": {}}, "there are no importance weights without token overrides or async.max_staleness"),
        (
            {"algorithm": {"importance_detach": False, "kl_coef": 0.1, "kl_in": "reward"}},
            "the credit function and a KL in the reward take the weights of the policy before the step",
        ),
    ],
)
def test_importance_detach_that_does_nothing_is_said(make_config, changes, said):
    cfg = make_config(**{"async": {"max_staleness": 1}, "algorithm": {"importance_detach": False}, **changes})
    with Trainer(cfg) as trainer:
        found = [notice for notice in trainer.notices if "importance_detach=false" in notice]
    planned = [line for line in dry_run(cfg, "rl") if "importance_detach=false" in line]
    assert len(found) == len(planned) == (said is not None)
    for notice in (*found, *planned):
        assert re.search(rf"algorithm\.importance_detach=false does nothing: {said}$", notice)


@pytest.mark.parametrize(
    ("algorithm", "groups", "reference"),
    [
        ({}, range(2, 6), False),
        ({"kl_coef": 0.1, "kl_in": "loss"}, range(2, 6), True),
        ({"kl_coef": 0.1, "kl_in": "reward"}, range(6), True),
        ({"kl_coef": 0.0, "kl_in": "reward"}, range(2, 6), False),
        ({"credit": "srft", "reject_extreme": False}, range(6), False),  # needs entropies
        ({"trace_entropy_share": 0.2}, range(6), False),
    ],
)
def test_which_groups_need_log_probs_before_the_update(make_config, algorithm, groups, reference):
    """Of three mini-batches; all groups where something before the update reads them."""
    cfg = make_config(batch={"mini_batch": 2}, algorithm=algorithm)
    assert cfg.batch.updates == 3 and needed_log_probs(cfg, 6) == (groups, reference)


def test_the_groups_without_old_log_probs_are_the_first_mini_batch(make_config):
    """However many groups of a step are kept."""
    cfg = make_config(batch={"mini_batch": 2})
    for kept in range(cfg.batch.problems + 1):
        groups, _ = needed_log_probs(cfg, kept)
        first = next(mini_batches([[i] for i in range(kept)], cfg.batch.updates), [])
        assert [*first, *groups] == list(range(kept))


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_against_the_starting_policy(make_config, where):
    kl = {"kl_coef": 0.5, "kl_in": where, "kl_estimator": "k3"}
    mean = {"loss_reduction": "token-mean", "entropy_coef": 0.0}  # then the loss is the sum of two metrics
    rows = train_rows(make_config(name=where, algorithm=kl | mean, optim={"lr": 0.02}, train={"steps": 2}))
    if where == "loss":
        assert rows[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6) and rows[-1]["actor/kl_loss"] > 1e-4
        for row in rows:
            assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] + 0.5 * row["actor/kl_loss"], rel=1e-5)
    else:
        assert "actor/kl_loss" not in rows[0]
        assert rows[0]["critic/kl"] == pytest.approx(0.0, abs=1e-6) and rows[-1]["critic/kl"] > 1e-4


def test_rl_with_sft_loss(make_config):
    rows = train_rows(make_config(algorithm={"trace_term": "sft", "reject_extreme": False}, train={"steps": 2}))
    assert all(r["actor/sft_loss"] > 0 and "actor/off_pg_loss" not in r for r in rows)


def test_sft_writes_only_what_it_measured(make_config):
    rows = train_rows(make_config(train={"steps": 2}), "sft")
    measured = {"actor/loss", "actor/sft_loss", "actor/grad_norm", "actor/lr"}
    for row in rows:
        assert {k for k in row if k.startswith(("actor/", "rollout/", "critic/", "batch/"))} == measured
        assert row["actor/loss"] == pytest.approx(row["actor/sft_loss"], rel=1e-5)


def test_a_run_without_traces_writes_nothing_about_traces(make_config):
    for row in train_rows(
        make_config(guidance={"n_prefix": 0}, algorithm={"reject_extreme": False}, train={"steps": 2})
    ):
        about = {
            "actor/off_policy_prob",
            "actor/off_pg_loss",
            "actor/off_ratio_mean",
            "batch/off_solved",
            "actor/sft_loss",
        }
        assert not about & row.keys() and {"actor/on_policy_prob", "actor/pg_loss", "actor/entropy_loss"} <= row.keys()


def test_sft_shares_everything_and_learns(make_config, sums):
    cfg = make_config(
        optim={"lr": 1e-2, "schedule": "cosine", "warmup": 0.1},
        data={"eval": str(sums)},
        eval={"every": 10, "temperature": 0.0},
        train={"steps": 60, "save_every": 20, "keep": 1},
        batch={"problems": 16},
    )
    rows = train_rows(cfg, "sft")
    steps = [r for r in rows if "actor/sft_loss" in r]
    assert steps[-1]["actor/sft_loss"] < 0.3 * steps[0]["actor/sft_loss"]
    accuracy = {r["step"]: r["val-core/accuracy"] for r in rows if "val-core/accuracy" in r}
    assert set(accuracy) == {0, 10, 20, 30, 40, 50, 60} and max(accuracy.values()) > accuracy[0] + 0.2
    best = json.loads((cfg.folder / "best.json").read_text())
    assert best["accuracy"] == max(v for s, v in accuracy.items() if s)
    kept = {int(p.name[5:]) for p in (cfg.folder / "checkpoints").glob("step-*")}
    assert kept == {60, best["step"]}


def test_epochs_go_on_counting_problems_where_a_resume_changes_the_batch(make_config, capsys):
    def of(problems, epochs):  # of 24 problems
        train = {"steps": None, "epochs": epochs, "save_every": 50}
        reward, more = {"kind": "loop_rewards:length_parity"}, {"oversample_rounds": 4}  # draws, which do not count
        settings = {"reward": reward, "algorithm": more, "guidance": {"n_prefix": 0}}
        return make_config(batch={"problems": problems}, rollout={"max_tokens": 4}, train=train, **settings)

    assert len(train_rows(of(6, 0.75))) == 3
    Job(of(6, 0.75), "rl").alone()
    assert "already finished at step 3; raise train.epochs or choose another name=" in capsys.readouterr().out
    with Trainer(of(6, 2)) as trainer:
        assert trainer.run.total_steps == 8 and trainer.run.sampler.epoch == 1  # as if undisturbed
    assert [row["step"] for row in train_rows(of(12, 2))] == [1, 2, 3, 4, 5, 6]  # 18 problems, then 12 in each of 3
    for problems, total in ((12, 8), (6, 9), (24, 7)):
        with Trainer(of(problems, 3)) as trainer:
            assert trainer.progress.problems == 54 and trainer.run.total_steps == total


def test_epochs_instead_of_steps(make_config):
    cfg = make_config(train={"steps": None, "epochs": 0.5})
    assert train_rows(cfg)[-1]["step"] == 2  # 24 problems / 6 a step / 2


def test_rejection_without_signal_skips_the_update(make_config):
    cfg = make_config(guidance={"n_prefix": 0}, reward={"kind": "loop_rewards:always_wrong"}, train={"steps": 2})
    rows = train_rows(cfg)
    assert all(r["batch/rejected"] == 6 and "actor/grad_norm" not in r for r in rows)
    start, end = weights_in(cfg.model.path), weights_in(newest_model(cfg))
    assert all(torch.equal(start[n], end[n]) for n in start)


def test_oversampling_fills_the_batch_or_stops_clearly(make_config):
    # A third of the problems has no trace and hardly ever succeeds: other problems must take their place.
    cfg = make_config(algorithm={"oversample_rounds": 3}, record={"samples": 20}, train={"steps": 2})
    rows = train_rows(cfg)
    assert sum(r["batch/rejected"] for r in rows) > 0
    for step in (1, 2):
        credited = [r for r in read_json_lines(cfg.folder / "samples.jsonl") if r["step"] == step and r["advantages"]]
        assert len(credited) == 6 * 4
    hopeless = make_config(
        name="hopeless", guidance={"n_prefix": 0}, algorithm={"oversample_rounds": 2},
        reward={"kind": "loop_rewards:always_wrong"},
    )  # fmt: skip
    with pytest.raises(TrainingStopped, match="after 2 extra batches only 0 of 6 groups"):
        train_rows(hopeless)


def test_a_stop_keeps_what_was_learnt_and_can_be_resumed(make_config, monkeypatch, undisturbed):
    cfg = make_config(train={"save_every": 50})
    with Trainer(cfg) as trainer:
        original = training_step.play

        def stops_at_step_3(run, planned, batch):
            if batch.step == 2:
                run.sampler.next(5)
                raise TrainingStopped("enough")
            return original(run, planned, batch)

        monkeypatch.setattr(training_step, "play", stops_at_step_3)
        with pytest.raises(TrainingStopped):
            trainer.train()
    monkeypatch.undo()
    resumed = train_rows(cfg)
    losses = [[r.get("actor/loss") for r in rows] for rows in (resumed, undisturbed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


FAILS_AT: list[int] = []  # steps, counted from 0


@credit_function("test_fails_at_times")
def fails_at_times(group, cfg):
    if group.step in FAILS_AT:
        raise ZeroDivisionError("a rare group")
    return group_baseline(group, cfg)


def saved_steps(cfg):
    return sorted(path.name for path in (cfg.folder / "checkpoints").glob("step-*"))


def failing_run(make_config, monkeypatch):
    """A run whose credit function raises in its third step."""
    monkeypatch.setattr(sys.modules[__name__], "FAILS_AT", [2])
    return make_config(algorithm={"credit": "test_fails_at_times"}, train={"save_every": 50})


def test_an_error_in_a_step_costs_no_step_before_it(make_config, monkeypatch, undisturbed):
    cfg = failing_run(make_config, monkeypatch)
    with pytest.raises(ZeroDivisionError, match="a rare group"):
        train_rows(cfg)
    assert saved_steps(cfg) == ["step-000002"]
    monkeypatch.undo()
    assert [row.get("actor/loss") for row in train_rows(cfg)] == [row.get("actor/loss") for row in undisturbed]


def test_an_error_is_told_also_where_no_checkpoint_can_be_saved_after_it(make_config, monkeypatch, capsys):
    cfg = failing_run(make_config, monkeypatch)

    def broken(saver, progress):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Saver, "save", broken)
    with pytest.raises(ZeroDivisionError, match="a rare group"):
        train_rows(cfg)
    assert "no checkpoint of step 2: RuntimeError: CUDA error" in capsys.readouterr().err


def test_one_of_several_processes_does_not_wait_for_the_others_after_an_error(make_config, monkeypatch):
    asked = []
    with Trainer(make_config(train={"save_every": 50})) as trainer:
        trainer.step()
        monkeypatch.setattr(trainer, "save_if_new", lambda: asked.append(1))
        monkeypatch.setattr(training_step, "draw", lambda *_: 1 / 0)
        with trainer.recording() as records:
            for size, calls in ((2, 0), (1, 1)):
                trainer.run.world = replace(trainer.run.world, size=size)
                with pytest.raises(ZeroDivisionError):
                    trainer._step_and_after(records)
                assert len(asked) == calls


def test_a_step_that_fails_between_its_updates_is_not_saved(make_config, monkeypatch):
    cfg = make_config(batch={"mini_batch": 3}, train={"save_every": 50}, algorithm={"reject_extreme": False})
    with Trainer(cfg) as trainer:
        update, done = trainer.run.policy.update, []

        def fails_the_fourth_time(samples, lr):
            done.append(lr)
            return update(samples, lr) if len(done) < 4 else 1 / 0

        monkeypatch.setattr(trainer.run.policy, "update", fails_the_fourth_time)
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert trainer.progress.step == 2
    assert saved_steps(cfg) == []


OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 16.56 MiB is free. "
    "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid"
)


def test_out_of_memory_names_the_remaining_settings_and_the_run_resumes(make_config, monkeypatch):
    cfg = make_config(train={"save_every": 1})
    with Trainer(cfg) as trainer:
        update = trainer.run.policy.update

        def too_large(samples, lr):
            if trainer.progress.step == 3:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            return update(samples, lr)

        monkeypatch.setattr(trainer.run.policy, "update", too_large)
        with pytest.raises(TrainingStopped) as stop:
            trainer.train()
    assert str(stop.value).startswith("stopped: CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert str(stop.value).endswith(
        "16.56 MiB is free; try batch.tokens below 128 (not below 32), model.gradient_checkpointing=true, rollout.slots "
        'below 24, optim.offload=true, in a new run model.lora="{rank: 16}"'
    )
    assert [row["step"] for row in train_rows(cfg)] == [1, 2, 3, 4]


def test_knobs_that_are_turned_already_are_not_named(make_config):
    turned = {"model": {"gradient_checkpointing": True, "lora": {"rank": 4}}, "batch": {"problems": 2, "tokens": 32}}
    cfg = make_config(**turned, launch="torchrun", parallel={"workers": 2})
    error = torch.OutOfMemoryError("No room.")
    assert out_of_memory_advice(error, cfg) == (
        "No room; try rollout.slots below 24, parallel.gather=micro_batch, parallel.cpu_offload=true"
    )
    turned["model"]["lora"]["quantize"] = "nf4"
    cfg = make_config(**turned, optim={"offload": True}, rollout={"n": 4, "max_tokens": 16, "slots": None})
    assert out_of_memory_advice(error, cfg) == "No room; only shorter responses can help"
    sharded = {"launch": "torchrun", "parallel": {"workers": 2, "cpu_offload": True}, "batch": turned["batch"]}
    half = make_config(model={"gradient_checkpointing": True, "dtype": "bfloat16"}, **sharded)
    assert out_of_memory_advice(error, half) == "No room; try rollout.slots below 24"  # no adapters in bfloat16 there
    served = make_config(rollout={"n": 4, "max_tokens": 16, "slots": None, "engine": "vllm"}, **turned)
    assert "rollout.vllm.memory_fraction below" in out_of_memory_advice(error, served)


def test_a_failing_evaluation_does_not_cost_the_steps(make_config, sums, monkeypatch):
    cfg = make_config(data={"eval": str(sums)}, train={"steps": 1})
    with Trainer(cfg) as trainer:
        monkeypatch.setattr(trainer, "evaluate", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train()
    assert (cfg.folder / "checkpoints" / "latest" / "model" / "config.json").is_file()


def test_kl_in_the_reward_survives_a_step_without_a_signal(make_config):
    cfg = make_config(
        guidance={"n_prefix": 0}, reward={"kind": "loop_rewards:always_wrong"}, train={"steps": 1},
        algorithm={"kl_coef": 0.1, "kl_in": "reward"},
    )  # fmt: skip
    assert train_rows(cfg)[0]["batch/rejected"] == 6


def test_non_finite_steps_are_skipped_counted_and_stop_the_run_with_samples_saved(make_config, monkeypatch):
    cfg = make_config(train={"max_bad_steps": 2})
    with Trainer(cfg) as trainer:
        monkeypatch.setattr(trainer.run.verifier, "score", lambda items: [Score(float("nan"))] * len(items))
        with pytest.raises(TrainingStopped, match="2 updates in a row were not finite"):
            trainer.train()
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert rows[0]["train/skipped_updates"] == 1
    saved = read_json_lines(cfg.folder / "bad-step-000002.jsonl")
    assert len(saved) == 24 and math.isnan(saved[0]["reward"])


def test_skipped_updates_are_counted_over_the_whole_run(make_config, monkeypatch):
    """Bad in steps 1 and 3: two in all, never two in a row."""
    cfg = make_config(train={"max_bad_steps": 2, "steps": 4}, algorithm={"reject_extreme": False})
    with Trainer(cfg) as trainer:
        score = trainer.run.verifier.score

        def bad_at_times(items):
            return [Score(float("nan"))] * len(items) if trainer.progress.step in (0, 2) else score(items)

        monkeypatch.setattr(trainer.run.verifier, "score", bad_at_times)
        trainer.train()
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert [row.get("train/skipped_in_all") for row in rows] == [1, None, 2, None]


def test_a_rollout_that_stops_the_run_costs_no_step_before_it(make_config, monkeypatch):
    cfg = make_config(train={"steps": 4, "save_every": 4})
    with Trainer(cfg) as trainer:
        engine = trainer.run.engines.current
        generate = engine.generate

        def lost(*args, **options):
            if trainer.progress.step == 2:
                raise TrainingStopped("all servers are lost")
            return generate(*args, **options)

        monkeypatch.setattr(engine, "generate", lost)
        with pytest.raises(TrainingStopped, match="all servers are lost"):
            trainer.train()
    assert [p.name for p in (cfg.folder / "checkpoints").glob("step-*")] == ["step-000002"]


def test_lora_trains_adapters_saves_a_plain_model_and_resumes(make_config):
    common = {"model": {"lora": {"rank": 4, "alpha": 8.0}}, "optim": {"lr": 1e-2}, "algorithm": {"kl_coef": 0.1}}
    whole = make_config(name="whole", train={"steps": 2}, **common)
    train_rows(whole)
    base, tuned = weights_in(whole.model.path), weights_in(newest_model(whole))
    changed = {n for n in base if not torch.equal(base[n], tuned[n])}
    assert changed and all("proj" in n for n in changed)
    train_rows(make_config(name="half", train={"steps": 1}, **common))
    resumed = make_config(name="half", train={"steps": 2}, **common)
    train_rows(resumed)
    again = weights_in(newest_model(resumed))
    assert all(torch.equal(tuned[n], again[n]) for n in tuned)


def test_a_saved_model_is_merged_and_moved_to_the_host_layer_by_layer(make_config, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    cfg, events = make_config(model={"lora": {"rank": 2}}), []

    class Merged:
        def __init__(self, tensor):
            self.tensor = tensor
            events.append("merged")

        def cpu(self):
            events.append("moved")
            return self.tensor

    found = lambda model: ((name, Merged(tensor)) for name, tensor in tensors_of(model))  # noqa: E731
    monkeypatch.setattr("luffy.train.weights.tensors_of", found)
    Export(load_policy(cfg.model, "cpu"), make_tokenizer(), (1,), lora=True).write(tmp_path / "saved")
    assert len(events) > 20 and events == ["merged", "moved"] * (len(events) // 2)


def test_lora_reference_is_the_policy_without_its_adapters(make_config):
    changes = {"model": {"lora": {"rank": 4}}, "algorithm": {"kl_coef": 0.5}, "optim": {"lr": 5e-2}}
    rows = train_rows(make_config(train={"steps": 2}, **changes))
    kl = [r["actor/kl_loss"] for r in rows if "actor/kl_loss" in r]
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[-1] > 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_in_two_parts_equals_one_in_one_go(make_config, dtype):
    """bf16: the master weights are restored, not the rounded ones; dropout: the random state is restored."""
    common = {
        "model": {"dtype": dtype, "lora": {"rank": 4, "dropout": 0.3} if dtype == "float32" else None},
        "optim": {"lr": 1e-4, "weight_decay": 0.1},
        "batch": {"problems": 3},
    }
    whole = train_rows(make_config(name="whole", **common))
    train_rows(make_config(name="parts", train={"steps": 2}, **common))
    parts = train_rows(make_config(name="parts", **common))
    figure = lambda rows: [(r["actor/loss"], r["actor/grad_norm"]) for r in rows if "actor/loss" in r]  # noqa: E731
    assert figure(parts) == figure(whole)
    tuned = [weights_in(newest_model(make_config(name=n))) for n in ("whole", "parts")]
    assert all(torch.equal(tuned[0][n], tuned[1][n]) for n in tuned[0])


def test_a_failing_tracker_never_ends_a_run(make_config, monkeypatch, capsys):

    def full_disk(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoardTracker, "log", full_disk)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=full_disk))
    rows = train_rows(make_config(record={"tensorboard": True, "wandb": True}, train={"steps": 2}))
    assert len(rows) == 2
    said = capsys.readouterr().err
    assert said.count("TensorBoard failed and is off from step 1") == 1 and "W&B is off" in said


def test_dropped_data_is_said_and_kept(make_config, sums, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    long_prompt = json.dumps({"id": "long", "prompt": "1" * 40, "answer": "1", "traces": ["1"]})
    long_trace = json.dumps({"id": "trace", "prompt": "1+1", "answer": "2", "traces": ["1" * 40]})
    broken = json.dumps({"id": "broken", "prompt": "1+1", "answer": None})
    data.write_text(sums.read_text() + "\n".join([long_prompt, long_trace, broken]) + "\n")
    cfg = make_config(
        data={"train": str(data), "eval": str(data), "overlong_prompt": "drop", "bad_rows": "skip"}, train={"steps": 1}
    )
    train_rows(cfg)
    said = capsys.readouterr().err
    assert "training data: 1 row(s) skipped as unusable (data.bad_rows), 1 prompt(s) dropped as longer than" in said
    assert "data.max_prompt_tokens, 1 trace(s) dropped as longer than rollout.max_tokens" in said
    assert "held-out data: 1 prompt(s) dropped as longer than data.max_prompt_tokens" in said
    assert json.loads((cfg.folder / "data.json").read_text())["train"]["prompts_dropped"] == 1


def test_a_weighted_reward_above_one_still_counts_as_solved(make_config, sums):
    weights = {"numeric": 1.0, "loop_rewards:always_right": 0.1}
    cfg = make_config(reward={"weights": weights}, data={"eval": str(sums)}, train={"steps": 1})
    rows = train_rows(cfg)
    assert rows[0]["batch/off_solved"] == 1.0 and rows[0]["critic/score/max"] == pytest.approx(1.1)


def test_sft_records_its_samples_and_saves_those_of_a_bad_step(make_config, monkeypatch):
    cfg = make_config(train={"max_bad_steps": 1})
    with Trainer(cfg, "sft") as trainer:
        with torch.no_grad():
            trainer.model.lm_head.weight[0] = float("nan")
        with pytest.raises(TrainingStopped):
            trainer.train()
    saved = read_json_lines(cfg.folder / "bad-step-000001.jsonl")
    assert len(saved) == 6 and all(all(r["off_policy"]) for r in saved)
    good = make_config(name="good", train={"steps": 1})
    train_rows(good, "sft")
    assert len(read_json_lines(good.folder / "samples.jsonl")) == 4


def test_sft_scores_at_temperature_one_whatever_the_rollouts_use(make_config):
    losses = [
        train_rows(make_config(name=str(t), rollout={"temperature": t}, train={"steps": 1}), "sft")[0]["actor/sft_loss"]
        for t in (1.0, 0.5)
    ]
    assert losses[0] == losses[1]


def test_two_trainings_on_one_folder(make_config):
    cfg = make_config()
    with Trainer(cfg), pytest.raises(UserError, match="another training is running"):
        Trainer(cfg)


def test_resume_never_refuses_an_existing_run_and_a_finished_one_is_left_alone(make_config):
    cfg = make_config(train={"steps": 1})
    before = train_rows(cfg)
    with pytest.raises(UserError, match="already holds a run"):
        Trainer(cfg, resume="never")
    assert train_rows(cfg) == before


def test_resume_from_a_path(make_config):
    train_rows(make_config(name="a"))
    start = make_config(name="a").folder / "checkpoints" / "step-000002"
    branch = train_rows(make_config(name="b"), resume=str(start))
    assert [r["step"] for r in branch] == [3, 4]
    with pytest.raises(UserError, match="later checkpoints"):
        Trainer(make_config(name="a"), resume=str(start))
    finished = make_config(name="a").folder / "checkpoints" / "latest"
    with pytest.raises(UserError, match="ended at step 4"):
        Trainer(make_config(name="d"), resume=str(finished))
    assert train_rows(make_config(name="a"), resume=str(finished))[-1]["step"] == 4  # by its link, into its own folder
    disk = make_config(name="a").folder.parent / "disk"
    newest = Path(shutil.move(finished.resolve(), disk))
    finished.with_name("step-000004").symlink_to(newest)
    assert train_rows(make_config(name="a"), resume=str(finished))[-1]["step"] == 4
    with pytest.raises(UserError, match=r"no manifest\.json"):
        Trainer(make_config(name="c"), resume=str(start.parent))


@pytest.mark.parametrize("steps", [1, 2])
def test_the_checkpoint_of_another_run_is_refused_where_there_is_one(make_config, steps):
    train_rows(make_config(name="a", train={"steps": 3, "save_every": 2}))
    before = train_rows(make_config(name="b", train={"steps": steps}))
    start = make_config(name="a").folder / "checkpoints" / "step-000002"
    with pytest.raises(UserError, match=rf"checkpoints of its own \(step-00000{steps}\).*--resume auto, or .* name="):
        Trainer(make_config(name="b"), resume=str(start))
    shutil.rmtree(make_config(name="b").folder / "checkpoints")
    with pytest.raises(UserError, match=f"records of its own, up to a checkpoint of step {steps}"):
        Trainer(make_config(name="b"), resume=str(start))
    assert read_json_lines(make_config(name="b").folder / "metrics.jsonl") == before


def test_a_branch_without_a_checkpoint_begins_again_and_keeps_its_records(make_config):
    """Of the branch itself, and of a training from step 1 in its folder."""
    train_rows(make_config(name="a"))
    start = make_config(name="a").folder / "checkpoints" / "step-000002"
    cfg = make_config(name="b", train={"save_every": 50})
    for resume, steps in (("auto", [1]), (str(start), [3])):
        with Trainer(cfg, resume=resume) as trainer:
            for _ in trainer.steps():
                break
        assert [r["step"] for r in read_json_lines(cfg.folder / "metrics.jsonl")] == steps
    assert [r["step"] for r in train_rows(cfg, resume=str(start))] == [3, 4]
    kept = [read_json_lines(cfg.folder / f"metrics.earlier-{n}.jsonl") for n in (1, 2)]
    assert [[r["step"] for r in rows] for rows in kept] == [[1], [3]]


def test_changed_data_is_refused_unless_allowed(make_config, sums, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(sums.read_text())
    train_rows(make_config(data={"train": str(data)}, train={"steps": 2}))
    lines = sums.read_text().splitlines()
    data.write_text("\n".join(lines[:-1]) + "\n")
    cfg = make_config(data={"train": str(data)})
    with pytest.raises(UserError, match="training data changed"):
        Trainer(cfg)
    assert train_rows(cfg, allow_changed_data=True)[-1]["step"] == 4


def test_a_changed_model_kind_is_refused_on_resume(make_config):
    train_rows(make_config(model={"lora": {"rank": 4}}, train={"steps": 2}))
    for lora in ({"rank": 8}, None):
        with pytest.raises(
            UserError, match=r"another kind of model: model\.lora .*'rank': 4.* -> .*; set that as it was"
        ):
            Trainer(make_config(model={"lora": lora}))


@pytest.fixture
def other_base(tiny_model, tmp_path):
    """Of the same shape as the tiny model."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
    model.save_pretrained(folder)
    return folder


def test_adapters_stay_on_the_base_they_were_trained_on(make_config, tiny_model, other_base, tmp_path):
    def config(path, steps):
        return make_config(model={"path": str(path), "lora": {"rank": 4}}, train={"steps": steps, "save_every": 1})

    train_rows(config(tiny_model, 1))
    with pytest.raises(
        UserError, match=r"LoRA adapters of another base model than model\.path=.*other; set model\.path"
    ):
        Trainer(config(other_base, 2))
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    with Trainer(config(moved, 2)) as trainer:
        (notice,) = [n for n in trainer.notices if "settings changed" in n]
        assert "the adapters stay the checkpoint's, the model below them is that of model.path" in notice
        trainer.train()
    # A checkpoint of before does not say of which base it is, and goes on.
    checkpoint = Checkpoint(trainer.saver.store.folder / "step-000002")
    state = checkpoint.state()
    assert len(state["model"].pop("base")) == 64
    (checkpoint.path / "state.json").write_text(json.dumps(state))
    entries = file_entries(checkpoint.path, [p for p in files_below(checkpoint.path) if p.name != MANIFEST])
    entries = {name: entry for name, entry in entries.items() if not is_card(name)}
    (checkpoint.path / MANIFEST).write_text(manifest_text(entries))
    train_rows(config(moved, 3))


def test_what_follows_another_model_path_at_a_resume_is_said(make_config, other_base):
    changed = {"model.path": ("a", "b")}
    plain, with_kl = make_config(), make_config(algorithm={"kl_coef": 0.1})
    of_its_own = make_config(algorithm={"kl_coef": 0.1}, model={"reference": str(other_base)})
    distill = {"credit": "distill", "reject_extreme": False}
    taught = make_config(algorithm=distill, teacher={"path": "self"}, guidance={"n_prefix": 0})
    stays, now = "model.path a -> b; the weights stay the checkpoint's", "is now the model of model.path"
    assert in_words(changed, plain, "rl") == in_words(changed, of_its_own, "rl") == stays
    assert in_words(changed, with_kl, "rl") == f"{stays}; the reference of the KL term {now}"
    assert in_words(changed, with_kl, "sft") == stays
    assert in_words(changed, taught, "rl") == f"{stays}; the teacher (teacher.path=self) {now}"
    averaged = replace(taught, teacher=replace(taught.teacher, average=0.1))
    assert in_words(changed, averaged, "rl") == stays


def test_another_command_is_named_before_another_kind_of_model(make_config):
    train_rows(make_config(train={"steps": 1}))
    with pytest.raises(UserError, match="was made by `luffy train`, this is `luffy sft`"):
        Trainer(make_config(model={"lora": {"rank": 4}}), "sft")


def test_settings_changed_at_a_resume_are_said_and_kept(make_config, capsys):
    cfg = make_config(train={"steps": 2, "save_every": 1})
    train_rows(cfg)
    before = (cfg.folder / "config.yaml").read_text()
    train_rows(make_config(train={"steps": 3, "save_every": 1}))
    assert "settings changed" not in capsys.readouterr().err and len(list(cfg.folder.glob("config-*"))) == 0
    changed = make_config(train={"steps": 4, "save_every": 1}, optim={"lr": 0.5}, guidance={"n_prefix": 0})
    with Trainer(changed) as trainer:
        assert trainer.start.changes["optim.lr"][1] == 0.5 and set(trainer.start.changes) == {
            "optim.lr",
            "guidance.n_prefix",
        }
        trainer.train()
    said = " ".join(capsys.readouterr().err.split())
    assert f"since step 3: guidance.n_prefix 1 -> 0, optim.lr {cfg.optim.lr} -> 0.5 (the settings before are in" in said
    kept = cfg.folder / "config-step-000003.yaml"
    assert kept.read_text().replace("\n  steps: 3", "\n  steps: 2") == before
    assert "lr: 0.5" in (cfg.folder / "config.yaml").read_text()


def test_settings_are_compared_with_those_that_made_the_checkpoint(make_config):
    cfg = make_config(train={"steps": 2, "save_every": 2}, data={"eval_also": {}})
    train_rows(cfg)
    made_with = (cfg.folder / "config.yaml").read_text()
    for lr in (0.5, 0.25):  # neither comes to a checkpoint
        with Trainer(make_config(train={"steps": 4, "save_every": 2}, optim={"lr": lr})) as trainer:
            write_settings(trainer.cfg, trainer.progress.step, trainer.start)
        assert trainer.start.changes == {"optim.lr": (cfg.optim.lr, lr)}
        assert (cfg.folder / "config-step-000002.yaml").read_text() == made_with
    with Trainer(make_config(train={"steps": 4, "save_every": 2})) as trainer:
        assert trainer.start.changes == {}


def test_a_branch_says_and_keeps_the_settings_of_the_run_it_came_from(make_config):
    def of(name, lr, steps=2):
        return make_config(name=name, optim={"lr": lr}, train={"steps": steps, "save_every": 1, "keep": 9})

    def branch(name, lr, start):
        with Trainer(of(name, lr, 6), resume=str(start)) as trainer:
            write_settings(trainer.cfg, trainer.progress.step, trainer.start)
        said = [n for n in trainer.notices if "settings changed" in n]
        return said, {step: c["optim.lr"] for step, c in changes_of(trainer.cfg.folder)}

    first = of("a", 0.1)
    train_rows(first)
    train_rows(of("a", 0.2, 4))
    steps = first.folder / "checkpoints"
    (said,), changes = branch("b", 0.3, steps / "step-000001")
    assert f"since step 1 of {first.folder}: optim.lr 0.1 -> 0.3 (the settings before are in" in said
    assert changes == {1: (0.1, 0.3)}
    assert (of("b", 0.3).folder / "config-step-000001.yaml").read_text() == to_yaml(first)
    assert branch("b", 0.1, steps / "step-000002") == ([], {})  # the settings of step 2, and nothing of the try before
    (said,), changes = branch("b", 0.3, steps / "step-000003")
    assert "optim.lr 0.2 -> 0.3" in said and changes == {2: (0.1, 0.2), 3: (0.2, 0.3)}
    alone = shutil.copytree(steps / "step-000003", first.folder.parent / "copied" / "step-000003")
    assert branch("c", 0.3, alone) == ([], {})  # nothing to compare with
    alone = shutil.copytree(alone, alone.parent / "checkpoints" / "step-000003")
    assert branch("d", 0.3, alone) == ([], {})


def test_a_plugin_changed_at_a_resume_is_said_and_the_one_before_is_kept(make_config, tmp_path, monkeypatch):
    plugin = tmp_path / "plugin_of_a_resume.py"
    monkeypatch.syspath_prepend(str(tmp_path))

    def resume(source, steps=2, **changes):
        plugin.write_text(source)
        cfg = make_config(plugins=[str(plugin)], train={"steps": steps, "save_every": 2}, **changes)
        with Trainer(cfg) as trainer:
            write_settings(trainer.cfg, trainer.progress.step, trainer.start)
            if source == "first = 1\n":
                trainer.train()
        return [n for n in trainer.notices if "plugin" in n]

    assert resume("first = 1\n") == resume("first = 1\n", steps=4) == []
    plugins = make_config().folder / "plugins"
    kept = plugins / "plugin_of_a_resume-step-000004.py"
    for source in ("second = 2\n", "third = 3\n"):  # neither comes to a checkpoint
        assert resume(source, steps=6) == [
            f"plugin plugin_of_a_resume changed since step 4 (its source before is in {kept})"
        ]
        assert kept.read_text() == "first = 1\n"
    for source, changed in (("first = 1\n", []), ("third = 3\n", ["first = 1\n"])):
        plugin.write_text(source)
        cfg = make_config(name=f"branch-{len(changed)}", plugins=[str(plugin)], train={"steps": 6})
        with Trainer(cfg, resume=str(make_config().folder / "checkpoints" / "step-000002")) as trainer:
            write_settings(trainer.cfg, trainer.progress.step, trainer.start)
        assert len([n for n in trainer.notices if "plugin" in n]) == len(changed)
        assert [path.read_text() for path in (cfg.folder / "plugins").glob("*-step-000002.py")] == changed
    shutil.rmtree(make_config().folder / "checkpoints" / "step-000004")  # steps 3 and 4 are made anew
    resume("third = 3\n", steps=6)
    assert [path.name for path in plugins.glob("*-step-*")] == ["plugin_of_a_resume-step-000002.py"]


def test_steps_that_are_made_anew_leave_no_settings(make_config):
    """After the change at step 4 the checkpoints from there on are lost."""
    cfg = make_config(train={"steps": 4, "save_every": 2})
    train_rows(cfg)
    made_with = (cfg.folder / "config.yaml").read_text()
    train_rows(make_config(train={"steps": 6, "save_every": 2, "keep": 9}, optim={"lr": 0.5}))
    train_rows(make_config(train={"steps": 8, "save_every": 2, "keep": 9}, optim={"lr": 0.25}))
    for step in (4, 6, 8):
        shutil.rmtree(cfg.folder / "checkpoints" / f"step-{step:06d}")
    with Trainer(make_config(train={"steps": 4}, optim={"lr": 0.125})) as trainer:
        write_settings(trainer.cfg, trainer.progress.step, trainer.start)
    assert trainer.start.changes == {"optim.lr": (cfg.optim.lr, 0.125)}
    (kept,) = cfg.folder.glob("config-step-*")
    assert kept.name == "config-step-000002.yaml" and kept.read_text() == made_with


def test_what_counts_as_a_changed_setting(make_config, tmp_path):
    cfg = make_config()
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert compare(cfg, "rl", 2, folder)[0] == {}  # nothing to compare with
    record = folder / "config.yaml"
    record.write_text("[not a mapping")
    assert compare(cfg, "rl", 2, folder)[0] == {}  # nor here
    record.write_text(to_yaml(make_config(name="other", out="x", train={"steps": 9}, data={"eval_also": {}})))
    assert compare(cfg, "rl", 2, folder)[0] == {}
    record.write_text(to_yaml(make_config(reward={"weights": {"gsm8k": 1.0}})))
    assert compare(cfg, "rl", 2, folder)[0] == {"reward.weights.gsm8k": (1.0, None)}
    record.write_text(to_yaml(cfg) + "gone: {knob: 1}\n")
    assert compare(cfg, "rl", 2, folder)[0] == {"gone.knob": (1, None)}


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [
        ({"optim": {"schedule": "constant"}}, False),
        ({"optim": {"schedule": "cosine"}}, True),
        ({"optim": {"schedule": "linear"}}, True),
        ({"optim": {"schedule": "inverse_sqrt"}}, False),
        ({"optim": {"schedule": "inverse", "warmup": 0.1}}, True),
        ({"optim": {"warmup": 0.1}}, True),
        ({"optim": {"warmup": 5}}, False),
        ({"guidance": {"strategy": "random"}}, False),
        ({"guidance": {"strategy": "linear"}}, True),
        ({"guidance": {"strategy": "linear", "prefix_steps": 10}}, False),
        ({"guidance": {"strategy": "linear", "prefix_steps": 0.5}}, True),
        ({"algorithm": {"trace_term": "sft", "mix": {"start": 0.9}}}, False),
        ({"algorithm": {"trace_term": "sft", "mix": {"start": 0.9, "end": 0.1}}}, True),
        ({"algorithm": {"trace_term": "sft", "mix": {"start": 0.9, "end": 0.1, "steps": 5}}}, False),
        ({"guidance": {"strategy": "linear", "n_prefix": 0}}, False),
        ({"rollout": {"offpolicy_guidance": {"model_path": "x", "tau_end": 0.0}}}, True),
        ({"rollout": {"offpolicy_guidance": {"model_path": "x", "tau_end": 0.0, "enable": False}}}, False),
        ({"rollout": {"offpolicy_guidance": {"model_path": "x", "eps_end": 0.0, "eps_steps": 5}}}, False),
    ],
)
def test_the_length_of_a_run_counts_where_a_schedule_follows_it(make_config, schedule, counts):
    before, now = (make_config(**schedule, train={"steps": steps}) for steps in (2, 4))
    before.folder.mkdir(parents=True)
    (before.folder / "config.yaml").write_text(to_yaml(before))
    found = compare(now, "rl", 2, now.folder)[0]
    assert found == ({"train.steps": (2, 4)} if counts else {})
    assert ("follow the length of the run" in in_words(found, now, "rl")) == counts


def test_what_makes_held_out_accuracy_another_figure(make_config):
    cfg = make_config(data={"eval": "x"})
    for key in (
        "data.eval",
        "data.system_prompt",
        "eval.n",
        "reward.weights.math",
        "reward.success",
        "rollout.max_tokens",
    ):
        assert measures_otherwise({"seed": (0, 1), key: (1, 2)}, cfg), key
    others = (
        "seed",
        "optim.lr",
        "data.eval_also.ood",
        "eval.every",
        "reward.http.retries",
        "rollout.n",
        "data.bad_rows",
    )
    assert not measures_otherwise({key: (1, 2) for key in others}, cfg)
    assert not measures_otherwise({"rollout.max_tokens": (1, 2)}, replace(cfg, eval=replace(cfg.eval, max_tokens=9)))
    assert not measures_otherwise({"data.eval": ("x", None)}, make_config())  # nothing is measured


def test_a_finished_run_asked_for_with_other_settings_says_so(make_config, capsys):
    cfg = make_config(train={"steps": 1})
    train_rows(cfg)
    elsewhere = shutil.copytree(cfg.model.path, cfg.folder.parent / "elsewhere")
    Job(make_config(train={"steps": 1}, optim={"lr": 0.5}, model={"path": str(elsewhere)}), "rl").alone()
    said = capsys.readouterr().out
    assert "already finished at step 1" in said and "other settings: model.path" in said
    assert f"optim.lr {cfg.optim.lr} -> 0.5; the weights stay the checkpoint's" in said


def test_steps_that_changed_nothing_are_told(make_config, capsys):
    train_rows(make_config(guidance={"n_prefix": 0}, reward={"kind": "loop_rewards:always_wrong"}, train={"steps": 2}))
    said = capsys.readouterr().err
    assert "step 2/2  reward 0.000  length" in said and "trained tok/s 0  no update, 6 groups without a signal" in said
    assert "2 of 2 steps changed nothing" in " ".join(said.split()) and "trace" not in said.partition("warning")[0]
    train_rows(make_config(name="learns", train={"steps": 2}))
    assert "changed nothing" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "idle"),
    [
        ({"batch/rejected": 3.0}, True),
        ({"batch/rejected": 3.0, "actor/grad_norm": 1.0}, False),
        ({"batch/rejected": 3.0, "train/skipped_updates": 1.0}, False),  # it had a signal, and a NaN
        ({"batch/rejected": 0.0}, False),
        ({"actor/sft_loss": 1.0}, False),
    ],
)
def test_which_steps_were_idle(values, idle):
    assert was_idle(values) is idle


def test_few_idle_steps_are_no_warning_and_only_those_of_this_start_count(make_config, monkeypatch, capsys):
    cfg = make_config(train={"steps": 3, "save_every": 1})
    monkeypatch.setattr(loop, "was_idle", lambda values: values["critic/rewards/mean"] >= 0 and next(idle))
    idle = iter([True, False, False])
    train_rows(cfg)
    assert "changed nothing" not in capsys.readouterr().err
    idle = iter([True, True])
    train_rows(make_config(train={"steps": 5, "save_every": 1}))
    assert "2 of 2 steps changed nothing" in " ".join(capsys.readouterr().err.split())


def test_held_out_accuracy_is_on_the_console(make_config, sums, capsys):
    cfg = make_config(data={"eval": str(sums)}, eval={"every": 2}, train={"steps": 2})
    Job(cfg, "rl").alone()
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if "  held-out " in line]
    assert [line.split()[2] for line in lines] == ["0/2", "2/2"]
    best = json.loads((cfg.folder / "best.json").read_text())
    assert f"best       step {best['step']}, held-out accuracy {best['accuracy']:.4g}" in said.out


def test_mini_batches_keep_groups_together():
    groups = [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]]
    assert list(mini_batches(groups, 2)) == [["a1", "a2"], ["b1", "b2", "c1", "c2"]]
    assert list(mini_batches(groups, 1)) == [["a1", "a2", "b1", "b2", "c1", "c2"]]
    assert list(mini_batches(groups, 4)) == [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]]
    assert list(mini_batches([], 2)) == []


@pytest.mark.parametrize(("kept", "sizes"), [(128, [64, 64]), (65, [32, 33]), (60, [30, 30]), (2, [1, 1]), (1, [1])])
def test_kept_groups_are_shared_evenly(kept, sizes):
    batch = BatchConfig(problems=128, mini_batch=64)
    assert [len(mini) for mini in mini_batches([["sample"]] * kept, batch.updates)] == sizes


@pytest.mark.parametrize(("right", "updates"), [(0, None), (1, 1), (2, 2), (4, 2), (6, 2)])
def test_as_many_updates_however_many_groups_are_kept(make_config, tmp_path, right, updates):
    """A group whose trace is wrong has no signal, since the model solves nothing by itself."""
    data = tmp_path / "some.jsonl"
    rows = [
        {"prompt": f"1+{i}", "answer": "987654", "traces": ["#### 987654" if i < right else "#### 1"]} for i in range(6)
    ]
    write_rows(data, rows)
    (row,) = train_rows(
        make_config(data={"train": str(data)}, batch={"mini_batch": 3}, optim={"lr": 0.02}, train={"steps": 1})
    )
    assert row["batch/rejected"] == 6 - right and row.get("train/updates") == updates
    if right > 1:  # the second mini-batch has left the old policy, which was kept
        assert abs(row["actor/ppo_kl"]) > 1e-6


def test_sft_shares_traces_evenly(make_config):
    rows = train_rows(make_config(batch={"mini_batch": 4}, train={"steps": 2}), "sft")
    assert [row["train/updates"] for row in rows] == [2, 2]


def test_the_threads_asked_for_are_taken(make_config):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Trainer(make_config(train={"threads": 1})):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_script_iterates_steps_and_reads_their_metrics(make_config):
    cfg = make_config()
    with Trainer(cfg) as trainer:
        seen = [(step, values["critic/rewards/mean"]) for step, values in trainer.steps()]
        assert trainer.is_finished and list(trainer.steps()) == []
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert seen == [(row["step"], row["critic/rewards/mean"]) for row in rows] and len(seen) == 4


def test_a_script_that_leaves_the_loop_goes_on_from_the_last_checkpoint(make_config, undisturbed):
    cfg = make_config(name="left")
    with Trainer(cfg) as trainer:
        for step, _ in trainer.steps():
            if step == 3:
                break
    with Trainer(cfg) as trainer:
        assert trainer.progress.step == 2
        trainer.train()
    resumed = read_json_lines(cfg.folder / "metrics.jsonl")
    losses = [[r.get("actor/loss") for r in rows] for rows in (resumed, undisturbed)]
    assert losses[0] == losses[1]


def test_prefixes_end_at_given_texts(make_config):
    guidance = {"strategy": "fixed", "min_ratio": 0.6, "max_ratio": 0.6, "cut_at": ["=", "\n"]}
    with Trainer(make_config(guidance=guidance)) as trainer:
        guided = [task for task in trainer.run.tasks if task.demonstrations]
        plan = trainer.run.planner.plan(guided, 0, [0] * len(guided))
        texts = [
            trainer.run.tokenizer.decode(p.token_ids) for group in plan for p in group if p.prefix and p.finish is None
        ]
    assert len(texts) == len(guided) and all(text.endswith(("=", "\n")) for text in texts)


def test_checkpoints_that_do_not_count_problems_have_as_many_as_their_steps(make_config):
    cfg = make_config(batch={"problems": 5})
    assert progress_of(cfg, {"progress": {"step": 3}}).problems == 15
    assert progress_of(cfg, {"progress": {"step": 3, "problems": 12}}).problems == 12
    assert progress_of(cfg, {}) == Progress()
