"""What a method remembers survives a kill and is the same on any number of ranks: replay, experts and SFT steps at once."""

import os
import signal

import pytest
import torch
from children import exit_code_in_child
from ranks import run_ranks
from trainings import (
    assert_same_metrics,
    assert_same_weights,
    final_weights,
    samples,
    stop_before_update,
    train,
    untimed_metrics,
)

from luffy.errors import TrainingStopped
from luffy.learn.policy import Policy
from luffy.train.loop import Trainer

STEPS = 6
IN_PARTS = {
    "rollout": {"max_tokens_per_step": 6, "n": 3},
    "replay": {},
    "sft_steps": {},
    "batch": {"problems": 6},
    "algorithm": {},
}


def memory_config(make_config, name, **changes):
    settings = {
        "reward": {"kind": "loop_rewards:length_parity"},
        "guidance": {"n_prefix": 0},
        "algorithm": {"credit": "lone_trace_sft", "off_policy_reshape": "exgrpo"},
        "rollout": {"n": 3},
        "batch": {"problems": 8, "expert_share": 0.25, "mini_batch": 4},
        "replay": {"share": 0.4, "start": 0.3, "problems": 5},
        "sft_steps": {"buffer": 2},
        "optim": {"lr": 1e-3, "eps": 1e-3},
        "train": {"steps": STEPS, "save_every": 2},
        "record": {"samples": 8, "samples_every": 1},
    }
    return make_config(name=name, **(settings | changes))


def test_a_resume_that_turns_a_memory_off_says_what_is_left_out(make_config):
    cfg = memory_config(make_config, "off", sft_steps={"buffer": 50})
    with Trainer(cfg) as trainer:
        trainer.train()
        replay, lessons = trainer.run.memory.replay, len(trainer.run.memory.lessons)
    known = len(replay.problems) + len(replay.retired)
    path = cfg.folder / "checkpoints" / f"step-{STEPS:06d}"
    assert known and lessons
    with Trainer(cfg) as trainer:
        assert "left out" not in " ".join(trainer.notices)
    with Trainer(memory_config(make_config, "off", replay={"share": 0.0}, sft_steps={"buffer": 0})) as trainer:
        assert [n for n in trainer.notices if "left out" in n] == [
            f"{known} problems in the replay of {path} are left out (replay.share=0)",
            f"{lessons} traces that waited for an SFT step of {path} are left out (sft_steps.buffer=0)",
        ]


@pytest.fixture(scope="module")
def undisturbed(make_config_in, tmp_path_factory):
    torch.set_num_threads(1)
    cfg = memory_config(make_config_in(tmp_path_factory.mktemp("undisturbed")), "undisturbed")
    train(cfg)
    rows = untimed_metrics(cfg)
    assert rows[-1]["method/replay_share"] > 0 and sum(row.get("method/sft_steps", 0) for row in rows) > 0
    return cfg


def train_until_fifth_step(cfg):
    """In a child: SIGKILL in the first update of the fifth step, which has drawn and remembered; step 4 is saved."""
    update, calls = Policy.update, 0

    def deadly(self, *args):
        nonlocal calls
        calls += args[-1] is not self.sft_optimizer
        if calls == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, *args)

    Policy.update = deadly
    train(cfg)


def picked(cfg):
    return [(r["step"], r["problem"], r["sample"], r["token_ids"], r["advantages"]) for r in samples(cfg)]


@pytest.mark.slow
def test_killed_and_resumed_equals_undisturbed(make_config, undisturbed):
    cfg = memory_config(make_config, "killed")
    assert exit_code_in_child(train_until_fifth_step, cfg) == -signal.SIGKILL
    train(cfg)
    assert untimed_metrics(cfg) == untimed_metrics(undisturbed) and picked(cfg) == picked(undisturbed)
    ours, theirs = final_weights(cfg), final_weights(undisturbed)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_two_ranks_go_on_where_one_stopped_and_one_where_they_did(make_config, undisturbed):
    """Replay, experts' sampler, lessons and the moments of both optimizers pass from whole to sharded and back."""
    for steps, make in ((2, train), (4, lambda cfg: run_ranks(2, train, cfg)), (STEPS, train)):
        cfg = memory_config(make_config, "many", train={"steps": steps, "save_every": 2})
        make(cfg)
        assert_same_metrics(untimed_metrics(cfg), untimed_metrics(undisturbed)[:steps])
    assert [row[:4] for row in picked(cfg)] == [row[:4] for row in picked(undisturbed)]
    assert_same_weights(final_weights(cfg), final_weights(undisturbed))


def test_a_checkpoint_from_before_there_was_a_memory_still_resumes(make_config):
    plain = {"replay": {}, "sft_steps": {}, "batch": {"problems": 6}, "algorithm": {}}
    train(memory_config(make_config, "old", **plain, train={"steps": 2, "save_every": 2}))
    cfg = memory_config(make_config, "old", train={"steps": 4, "save_every": 2})
    train(cfg)
    assert [row["step"] for row in untimed_metrics(cfg)] == [1, 2, 3, 4]
    assert [row.get("method/replay_size") for row in untimed_metrics(cfg)][:3] == [None, None, 0]


@pytest.mark.parametrize("changes", [{}, IN_PARTS], ids=["memory", "in parts"])
def test_stopped_between_rollout_and_update_equals_undisturbed(make_config, monkeypatch, changes):
    """As when the servers of a teacher are gone: the step has drawn, and begins again with the same problems."""
    whole, cfg = (
        memory_config(make_config, name, **changes, train={"steps": 4, "save_every": 50}) for name in ("whole", "cut")
    )
    train(whole)
    stop_before_update(monkeypatch, 3, "no server answers")
    with pytest.raises(TrainingStopped):
        train(cfg)
    monkeypatch.undo()
    train(cfg)
    assert untimed_metrics(cfg) == untimed_metrics(whole) and picked(cfg) == picked(whole)
