"""A run with stages is what its stages are as runs of their own, and what it is undisturbed whenever it is killed."""

import shutil
import signal
from dataclasses import replace

import pytest
import torch
from children import exit_code_in_child
from kills import acting_at, killed_at
from trainings import final_weights, train, untimed_metrics

from luffy import trainer as driver
from luffy.config import Config
from luffy.config.stages import stages_of
from luffy.errors import UserError
from luffy.learn.policy import Policy
from luffy.run_folder.changes import changes_of
from luffy.run_folder.checkpoint import CheckpointStore
from luffy.run_folder.stages import read_stages
from luffy.schema import build, to_dict
from luffy.train import loop
from luffy.train.loop import Trainer
from luffy.train.stage_end import without_gain
from luffy.trainer import train_stages

ROAD = {
    "sft": {
        "method": "sft", "until": "flat_loss", "patience": 1, "hand_on": "best", "eval": {"hold_out": 6},
        "optim": {"lr": 0.03}, "train": {"steps": 12}, "guidance": {"n_prefix": 0},
    },
    "opd": {
        "algorithm": {"credit": "distill", "reject_extreme": False}, "guidance": {"n_prefix": 0},
        "teacher": {"path": "self", "shown": "solution", "hint_text": "{solution}"}, "train": {"steps": 2},
        "data": {"max_prompt_tokens": 32},
    },
    "rl": {"optim": {"lr": 1e-3, "schedule": "cosine"}, "train": {"steps": 3}},
}  # fmt: skip


def with_stages(make_config, sums, name, stages=ROAD, **changes):
    values = {"data": {"eval": str(sums)}, "eval": {"every": 1, "limit": 4}, "train": {"save_every": 1}}
    return make_config(name=name, stages=stages, **(values | changes))


@pytest.fixture(scope="module")
def undisturbed(make_config_in, sums, tmp_path_factory):
    torch.set_num_threads(1)
    cfg = with_stages(make_config_in(tmp_path_factory.mktemp("undisturbed")), sums, "undisturbed")
    train_stages(cfg)
    return cfg


def test_the_road_has_one_count_of_steps_and_a_record(undisturbed):
    done = read_stages(undisturbed.folder).finished
    sft, opd = done
    assert (sft.name, sft.method, sft.first, sft.ended_by) == ("sft", "sft", 0, "flat_loss")
    assert (opd.first, opd.last, opd.handed_on, opd.ended_by) == (sft.last, sft.last + 2, sft.last + 2, "steps")
    rows = untimed_metrics(undisturbed)
    assert [row["step"] for row in rows] == list(range(sft.last + 6))
    assert [row["stage"] for row in rows] == ["sft"] * (sft.last + 1) + ["opd"] * 2 + ["rl"] * 3
    losses = {row["step"]: row["val-traces/loss"] for row in rows if row["stage"] == "sft"}
    best = min((loss, step) for step, loss in losses.items() if step)[1]
    assert sft.handed_on == best == sft.last - 1  # one evaluation was no better
    kept = {checkpoint.step: checkpoint for checkpoint in CheckpointStore(undisturbed.folder / "checkpoints", 2)}
    assert best in kept and not (kept[best].path / "optimizer.safetensors").exists()
    assert kept[max(kept)].state()["stage"] == "rl"


def test_a_road_equals_its_stages_as_runs(make_config, sums, undisturbed):
    rows, first = untimed_metrics(undisturbed), 0
    model = None
    for stage, last in zip(stages_of(undisturbed), (*read_stages(undisturbed.folder).finished, None), strict=True):
        steps = 3 if last is None else last.last - last.first
        values = to_dict(stage.cfg)
        values["train"] |= {"steps": steps, "keep": 20}
        values |= {"name": f"alone-{stage.name}", "out": str(undisturbed.folder.parent)}
        values["model"]["path"] = model or values["model"]["path"]
        alone = build(Config, values)
        train(alone, method=stage.method)
        theirs = [{**row, "step": row["step"] + first} for row in untimed_metrics(alone) if row["step"] or not first]
        ours = [row for row in rows if first <= row["step"] <= first + steps and row["stage"] == stage.name]
        assert [{k: v for k, v in row.items() if k != "stage"} for row in ours] == theirs
        if last is not None:
            model = str(alone.folder / f"checkpoints/step-{last.handed_on - first:06d}/model")
        first += steps
    ours, theirs = final_weights(undisturbed), final_weights(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


MOMENTS = {
    "in SFT": (Policy, "update", 2),
    "decided, not saved": (CheckpointStore, "save", 7),
    "saved, not finished": (driver, "finish", 1),
    "finished, the next not begun": (driver, "free_memory", 1),
    "in the second stage, before its first checkpoint": (CheckpointStore, "save", 8),
    "at the second border": (driver, "finish", 2),
    "in RL": (CheckpointStore, "save", 11),
}


def road_until_killed(cfg, moment):
    with killed_at(*MOMENTS[moment]):
        train_stages(cfg)


def equals(cfg, undisturbed):
    assert untimed_metrics(cfg) == untimed_metrics(undisturbed)
    ours, theirs = final_weights(cfg), final_weights(undisturbed)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = (read_stages(c.folder) for c in (cfg, undisturbed))
    assert [replace(done, settings={}) for done in ours.finished] == [
        replace(done, settings={}) for done in theirs.finished
    ]


ALWAYS = ("decided, not saved", "in the second stage, before its first checkpoint")


@pytest.mark.parametrize("moment", [m if m in ALWAYS else pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS])
def test_killed_and_resumed_equals_undisturbed(make_config, sums, undisturbed, moment):
    cfg = with_stages(make_config, sums, "killed")
    assert exit_code_in_child(road_until_killed, cfg, moment) == -signal.SIGKILL, "the moment never came"
    train_stages(cfg)
    equals(cfg, undisturbed)


def test_a_resume_that_changes_a_finished_stage_is_refused(undisturbed, make_config, sums):
    folder = {"out": undisturbed.out}
    for changes, said in (
        ({"optim": {"lr": 0.5}}, "stage opd is finished, and optim.lr 0.001 -> 0.5 would change it"),
        (
            {"stages": {**ROAD, "sft": {**ROAD["sft"], "patience": 2}}},
            "stage sft is finished, and stage.patience 1 -> 2",
        ),
        (
            {"stages": {"opd": ROAD["opd"], "rl": {}}},
            r"stage 1 of this run is finished and was sft \(sft\), now it is opd",
        ),
        ({"stages": {"sft": ROAD["sft"]}}, r"stage 2 of this run is finished and was opd \(rl\), now it is no stage"),
    ):
        with pytest.raises(UserError, match=said) as error:
            train_stages(with_stages(make_config, sums, "undisturbed", **{**folder, **changes}))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="names one checkpoint, and this run has stages"):
        train_stages(undisturbed, resume="somewhere")


def test_a_later_stage_may_change_and_another_may_follow(undisturbed, make_config, sums, tmp_path):
    shutil.copytree(undisturbed.folder, tmp_path / "runs" / "undisturbed", symlinks=True)
    longer = {
        **ROAD,
        "rl": {**ROAD["rl"], "optim": {"lr": 5e-4}, "train": {"steps": 4}},
        "more": {"train": {"steps": 1}},
    }
    cfg = with_stages(make_config, sums, "undisturbed", longer)
    train_stages(cfg)
    rows = untimed_metrics(cfg)
    assert [(row["step"], row["stage"]) for row in rows[-3:]] == [(12, "rl"), (13, "rl"), (14, "more")]
    assert [done.name for done in read_stages(cfg.folder).finished] == ["sft", "opd", "rl"]
    assert "stages.rl.optim.lr" in changes_of(cfg.folder)[0][1]


def test_a_stage_ends_when_its_seconds_are_spent_whatever_a_resume_takes(make_config, sums, monkeypatch):
    road = {"sft": {"method": "sft", "seconds": 1000.0, "train": {"steps": 9}}, "rl": {"train": {"steps": 1}}}
    cfg = with_stages(make_config, sums, "seconds", road, eval={"every": 0})
    throughput = loop.throughput
    monkeypatch.setattr(loop, "throughput", lambda *_: {**throughput({}, 1.0), "timing_s/step": 450.0})
    with acting_at(CheckpointStore, "save", 3, stop_it), pytest.raises(RuntimeError, match="stopped here"):
        train_stages(cfg)
    assert read_stages(cfg.folder).ending.step == 3
    monkeypatch.setattr(loop, "throughput", throughput)  # the clock runs fast again
    train_stages(cfg)
    (sft,) = read_stages(cfg.folder).finished
    assert (sft.last, sft.ended_by, sft.handed_on) == (3, "seconds", 3)
    assert [row["step"] for row in untimed_metrics(cfg)] == [1, 2, 3, 4] or untimed_metrics(cfg)[-1]["step"] == 4


def stop_it():
    raise RuntimeError("stopped here")


def test_a_run_that_is_finished_names_what_would_go_on(make_config, sums, capsys):
    road = {"sft": {"method": "sft", "train": {"steps": 1}}, "rl": {"seconds": 0.001, "train": {"steps": 9}}}
    cfg = with_stages(make_config, sums, "done", road)
    for _ in range(2):
        driver.Job(cfg).alone()
    assert "already finished at step 2; change stages.rl.seconds, which ended it, or choose" in capsys.readouterr().out
    driver.Job(with_stages(make_config, sums, "done", {"sft": road["sft"]})).alone()
    assert "already finished: no stage is left; add one, or choose another name=" in capsys.readouterr().out


def test_flat_means_so_many_scores_without_a_gain():
    assert without_gain([0.1, 0.2, 0.2, 0.2], 0.0) == 2 and without_gain([0.3, 0.2, 0.31], 0.0) == 0
    assert without_gain([0.1, 0.14, 0.18], 0.05) == 0 and without_gain([0.1, 0.14, 0.15], 0.05) == 2
    assert without_gain([], 0.0) == 0


def test_a_trainer_of_one_stage_refuses_stages(make_config, sums):
    with pytest.raises(UserError, match="has stages"):
        Trainer(with_stages(make_config, sums, "whole"))
