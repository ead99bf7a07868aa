"""Every feature on several NCCL ranks: the samples, losses, gradients and weights of one process on the same GPU."""

import pytest
import torch
from features import FEATURES, SMOOTH, base_config, configs, make_guide, note_seen
from ranks import assert_same_run, luffy_train, run_ranks, train_and_keep_gradients
from trainings import assert_same_metrics, assert_same_weights, final_weights, train, untimed_metrics

from luffy.train.loop import Trainer

NCCL = "torchrun, NCCL"


@pytest.fixture(scope="session")
def guide(tiny_model, tmp_path_factory):
    return make_guide(tiny_model, tmp_path_factory.mktemp("guide"))


@pytest.mark.parametrize("name", FEATURES)
def test_ranks_agree_with_one_process(make_config, sums, guide, name):
    if "lora" in FEATURES[name].changes.get("model", {}):
        pytest.importorskip("peft")
    feature = FEATURES[name]
    alone, many = configs(feature, make_config, sums, guide, device="cuda")
    expected = train_and_keep_gradients(alone, feature.method)
    ranks = run_ranks(
        feature.ranks, train_and_keep_gradients, many, feature.method, device="cuda", fresh=feature.is_hybrid
    )
    for gradients in ranks:
        assert_same_run(many, alone, gradients, expected, tolerance=2e-4)
    note_seen(name, NCCL, str(feature.ranks))


@pytest.mark.parametrize("precision", ["model", "fp8"])
def test_bfloat16_shares_prompts_merges_products_and_rolls_out_in_fp8(make_config, sums, precision):
    """Rounding differs with the rows of a product, so samples drift apart: the first step is close, all are finite."""
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 products on this GPU")
    low = {"model": {"dtype": "bfloat16", "device": "cuda"}, "rollout": {"precision": precision},
           "optim": {"lr": 1e-4, "eps": 1e-3}}  # fmt: skip
    alone, many = (base_config(make_config, sums, name, **low) for name in ("alone", "many"))
    train(alone)
    (found, _) = run_ranks(2, train_and_look, many, device="cuda")
    assert found == {"shares_prompts": True}
    for a, b in zip(untimed_metrics(many), untimed_metrics(alone), strict=True):
        assert a["actor/loss"] == pytest.approx(b["actor/loss"], abs=0.05)
        assert a["perf/computed_tokens"] < a["perf/update_tokens"]
    assert untimed_metrics(many)[0]["actor/grad_norm"] == pytest.approx(
        untimed_metrics(alone)[0]["actor/grad_norm"], rel=0.1
    )
    note_seen(
        {"model": "bfloat16: shared prompts in updates, merged products in rollouts", "fp8": "fp8 rollouts"}[precision],
        NCCL,
        "2",
    )


def train_and_look(cfg, world):
    with Trainer(cfg, world=world) as trainer:
        trainer.train()
        return {"shares_prompts": trainer.run.policy.scorer.shares_prompts}


def test_a_run_goes_on_with_another_number_of_ranks(make_config):
    common = {"model": {"device": "cuda"}, "optim": SMOOTH}
    whole = make_config(name="whole", train={"steps": 6, "save_every": 2}, **common)
    train(whole)
    for count, steps in ((2, 2), (1, 4), (3, 6)):
        cfg = make_config(name="moved", train={"steps": steps, "save_every": 2}, **common)
        run_ranks(count, train, cfg, device="cuda")
    assert_same_metrics(untimed_metrics(cfg), untimed_metrics(whole), 1e-3)
    assert_same_weights(final_weights(cfg), final_weights(whole), 1e-3)
    note_seen("resume with another number of processes", NCCL, "2, 1, 3")


def test_a_killed_rank_ends_all_and_the_run_resumes(make_config, tmp_path):
    """By the command itself: its launcher ends the rank that is left."""
    common = {"optim": SMOOTH, "model": {"device": "cuda"}, "train": {"steps": 4, "save_every": 2},
              "launch": "torchrun", "parallel": {"workers": 2, "timeout_s": 120}}  # fmt: skip
    whole, killed = (make_config(name=name, **common) for name in ("whole", "killed"))
    run_ranks(2, train, whole, device="cuda")
    folder = killed.folder / "checkpoints"
    code, said = luffy_train(killed, tmp_path, RANK=1, DIES_IN="update", CHECKPOINTS=folder)
    assert (folder / "died").exists() and code == 1, said
    assert said.splitlines()[-1].startswith("luffy: error: process 1 of 2 was ended by SIGKILL"), said
    assert len(untimed_metrics(killed)) < 4
    (folder / "died").unlink()
    code, said = luffy_train(killed, tmp_path)
    assert code == 0 and "resumed at step 2" in said, said
    assert_same_metrics(untimed_metrics(killed), untimed_metrics(whole), 1e-5)
    note_seen("one process killed, then resumed", NCCL, "2")
