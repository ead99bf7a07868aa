"""Several processes: versions of tokens, fewer traces than processes, bfloat16 (test_features.py has the features)."""

import threading

import pytest
import torch
from features import base_config
from ranks import run_ranks, train_and_keep_gradients
from trainings import assert_same_metrics, assert_same_weights, final_weights, samples, train, untimed_metrics

from luffy.learn.policy import Policy
from luffy.run_folder.checkpoint import Checkpoint
from luffy.schema import to_dict
from luffy.step.prefetch import Prefetcher
from luffy.train.loop import Trainer


def test_tokens_of_a_group_carry_the_version_of_the_process_that_made_them(make_config, sums):
    """Of two processes with one engine, the follower begins its part of step 3 with version 0 as its newest, the
    leader with version 1: both parts are the leader's work."""
    changes = {"async": {"max_staleness": 2}, "train": {"steps": 4, "save_every": 4}}
    base = base_config(make_config, sums, "lagging", **changes)
    cfg = make_config(
        **to_dict(base) | {"launch": "torchrun", "parallel": {"workers": 2, "rollout_group": 2, "timeout_s": 60}}
    )
    begun = run_ranks(2, versions_begun, cfg)
    assert begun[0][2] == 1 and begun[1][2] == 0  # by their own account
    found = {(row["step"], v) for row in samples(cfg) for v, off in zip(row["versions"], row["off_policy"], strict=True) if not off}  # fmt: skip
    assert found == {(step + 1, begun[0][step]) for step in range(4)}
    assert [row["async/staleness/max"] for row in untimed_metrics(cfg)] == [step - begun[0][step] for step in range(4)]


def versions_begun(cfg, world):
    """Train; the version that each batch began with, as this process saw it. The main process holds back the batch of
    step 3 until there is a version 1, and the other one the first update until it has begun that batch."""
    begin, update, versions, third = Prefetcher._begin, Policy.update, {}, threading.Event()

    def noting(self, step):
        if step == 2 and world.is_main:
            with self._changed:
                assert self._changed.wait_for(lambda: self._version >= 1, 60)
        versions[step] = begin(self, step)
        if step == 2:
            third.set()
        return versions[step]

    def held_up(self, *args):
        assert world.is_main or third.wait(60)
        return update(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefetcher, "_begin", noting)
        patch.setattr(Policy, "update", held_up)
        train(cfg, world)
    return versions


def test_sft_with_fewer_traces_than_ranks(make_config, sums):
    torch.set_num_threads(1)
    alone, many = (base_config(make_config, sums, name, batch={"problems": 2}) for name in ("alone", "many"))
    expected = train_and_keep_gradients(alone, "sft")
    for gradients in run_ranks(3, train_and_keep_gradients, many, "sft"):
        for a, b in zip(gradients, expected, strict=True):
            assert_same_weights(a, b)
    assert_same_metrics(untimed_metrics(many), untimed_metrics(alone))
    seen = [[(r["step"], r["sample"], r["prompt"], r["token_ids"]) for r in samples(cfg)] for cfg in (many, alone)]
    assert seen[0] == seen[1]


def test_bfloat16_computes_low_and_keeps_float32_masters(make_config, sums):
    """Rounding differs with the number of rows of a matrix product, so this is close, not equal."""
    torch.set_num_threads(1)
    low = {"model": {"dtype": "bfloat16"}, "train": {"steps": 2, "save_every": 2}, "optim": {"lr": 1e-4, "eps": 1e-3}}
    alone, many = (base_config(make_config, sums, name, **low) for name in ("alone", "many"))
    train(alone)
    types = run_ranks(2, types_of_a_run, many)
    assert types == [({torch.float32}, {torch.bfloat16})] * 2
    for a, b in zip(untimed_metrics(many), untimed_metrics(alone), strict=True):
        assert a["actor/loss"] == pytest.approx(b["actor/loss"], abs=5e-3)
    saved = {p.dtype for p in final_weights(many).values()}
    assert saved == {torch.bfloat16}
    masters = Checkpoint(max((many.folder / "checkpoints").glob("step-*"))).tensors()
    assert masters["lm_head.weight/master"].dtype == torch.float32
    resumed = base_config(make_config, sums, "many", **(low | {"train": {"steps": 3}}))
    train(resumed)  # one process takes up what two left
    assert [row["step"] for row in untimed_metrics(resumed)] == [1, 2, 3]


def types_of_a_run(cfg, world):
    with Trainer(cfg, world=world) as trainer:
        trainer.train()
        copy = trainer.run.engines.replica.model
        return {p.dtype for p in trainer.model.parameters()}, {p.dtype for p in copy.parameters()}
