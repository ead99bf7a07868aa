"""Numbers that are none, and batches with nothing in them: no update is ever made from them, and all is counted."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import pytest
import torch
from builders import make_samples
from safetensors.torch import load_file, save_file
from trainings import train

from luffy.errors import ConfigError, TrainingStopped
from luffy.learn.policy import NonFiniteUpdate, Policy
from luffy.models.load import load_model
from luffy.run_folder.recorder import read_json_lines
from luffy.train.loop import Trainer
from luffy.types import Score

NO_NUMBERS = [float("nan"), float("inf"), float("-inf")]


@pytest.fixture
def policy(make_config):
    cfg = make_config(optim={"lr": 0.01, "weight_decay": 0.1})
    return Policy(load_model(cfg.model.path), cfg)


def state_of(policy):
    tensors = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    return tensors | {n: t.clone() for n, t in policy.optimizer.tensors()}


def assert_untouched(policy, before):
    after = state_of(policy)
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


def spoilt(samples, stream, value):
    """The third token of the second sample (a teacher's prefix) carries ``value``."""
    changed = getattr(samples[1], stream).clone()
    changed[1] = value
    return [samples[0], replace(samples[1], **{stream: changed}), *samples[2:]]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("stream", ["advantages", "old_log_probs", "behavior_log_probs"])
def test_a_stream_that_is_no_number_moves_neither_weights_nor_moments(make_config, stream, value):
    cfg = make_config(algorithm={"teacher_probs": "recorded"}, optim={"weight_decay": 0.1})
    policy = Policy(load_model(cfg.model.path), cfg)
    policy.update(make_samples(), 0.01)
    before = state_of(policy)
    samples = make_samples()
    if stream == "old_log_probs":  # counts on the policy's own tokens
        samples[1] = replace(samples[1], authors=torch.zeros_like(samples[1].authors))
    try:
        policy.update(spoilt(samples, stream, value), 0.01)
    except NonFiniteUpdate:
        assert_untouched(policy, before)
    else:  # a probability of 0 or a ratio of 0 is a number, after all: then the update must be one
        assert stream != "advantages"
        assert all(t.isfinite().all() for t in state_of(policy).values())


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_gradient_that_is_no_number_is_dropped_whole(policy, value):
    policy.update(make_samples(), 0.01)
    before = state_of(policy)
    parameter = next(policy.model.parameters())
    hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
    with pytest.raises(NonFiniteUpdate, match="gradient norm (nan|inf)"):
        policy.update(make_samples(), 0.01)
    assert_untouched(policy, before)
    hook.remove()
    assert math.isfinite(policy.update(make_samples(), 0.01)["actor/grad_norm"].value)


@pytest.mark.faults
@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("method", ["rl", "sft"])
def test_weights_that_are_no_numbers_stop_the_run_before_an_update(make_config, tiny_model, tmp_path, value, method):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    cfg = make_config(model={"path": str(folder)}, train={"max_bad_steps": 2})
    with pytest.raises((TrainingStopped, FloatingPointError), match="(?i)finite|nan"), Trainer(cfg, method) as trainer:
        trainer.train()
    assert not list(cfg.folder.glob("checkpoints/step-*"))


@pytest.mark.faults
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_rewards_that_are_no_numbers_never_reach_the_weights(make_config, monkeypatch, value):
    cfg = make_config(train={"max_bad_steps": 2}, algorithm={"reject_extreme": False})
    with Trainer(cfg) as trainer:
        before = {n: p.clone() for n, p in trainer.model.named_parameters()}
        monkeypatch.setattr(trainer.run.verifier, "score", lambda items: [Score(value)] * len(items))
        with pytest.raises(TrainingStopped, match="2 updates in a row were not finite"):
            trainer.train()
        assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    assert read_json_lines(cfg.folder / "metrics.jsonl")[0]["train/skipped_updates"] == 1


def test_one_bad_update_among_good_ones_is_counted_and_the_run_goes_on(make_config, monkeypatch):
    cfg = make_config(algorithm={"reject_extreme": False})
    with Trainer(cfg) as trainer:
        original = trainer.run.verifier.score

        def bad_at_the_second_step(items):
            return [Score(float("nan"))] * len(items) if trainer.run.progress.step == 1 else original(items)

        monkeypatch.setattr(trainer.run.verifier, "score", bad_at_the_second_step)
        trainer.train()
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert [row.get("train/skipped_updates", 0) for row in rows] == [0, 1, 0, 0]
    assert [p.name for p in cfg.folder.glob("bad-step-*")] == ["bad-step-000002.jsonl"]


def test_no_valid_token_is_no_gradient(make_config):
    cfg = make_config()
    policy = Policy(load_model(cfg.model.path), cfg)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    nothing = [replace(s, rl_weights=torch.zeros_like(s.rl_weights)) for s in make_samples()]
    metrics = policy.update(nothing, 0.01)
    assert metrics["actor/loss"].value == 0.0 and metrics["actor/grad_norm"].value == 0.0
    assert all(math.isfinite(m.value) for m in metrics.values())
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())


@pytest.mark.faults
@pytest.mark.parametrize(
    "reduction", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_dropping_every_token_by_its_probability_leaves_a_finite_run(make_config, reduction):
    cfg = make_config(algorithm={"all_max_clip": 1e-12, "loss_reduction": reduction, "reject_extreme": False})
    train(cfg)
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert [row["actor/grad_norm"] for row in rows] == [0.0] * 4
    assert all(math.isfinite(v) for row in rows for v in row.values())


@pytest.mark.faults
@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("responses of one token", {"rollout": {"max_tokens": 1, "n": 4}, "guidance": {"n_prefix": 0}}),
        ("a group of one", {"rollout": {"n": 1, "max_tokens": 16}, "guidance": {"n_prefix": 0}}),
        ("a group of one with its spread", {"rollout": {"n": 1, "max_tokens": 16}, "guidance": {"n_prefix": 0}}),
        ("a group of one trace", {"rollout": {"n": 1, "max_tokens": 16}, "guidance": {"n_prefix": 1}}),
        ("one own sample beside a trace", {"rollout": {"n": 2, "max_tokens": 16}, "guidance": {"n_prefix": 1}}),
        ("one problem a step", {"batch": {"problems": 1, "tokens": 128}}),
    ],
)
def test_the_smallest_batches_give_finite_figures(make_config, what, changes):
    spread = "spread" in what
    cfg = make_config(algorithm={"reject_extreme": False, "normalize_std": spread}, **changes)
    train(cfg)
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert len(rows) == 4 and all(math.isfinite(v) for row in rows for v in row.values())


def test_groups_of_traces_alone_have_no_own_baseline_and_are_refused_beforehand(make_config):
    with pytest.raises(ConfigError, match="on-policy"):
        make_config(rollout={"n": 1, "max_tokens": 16}, guidance={"n_prefix": 1}, algorithm={"advantage": "grpo_split"})
