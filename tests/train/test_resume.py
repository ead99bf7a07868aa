"""A training killed with SIGKILL and resumed writes the same metrics and weights, bit for bit, as an undisturbed one."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from builders import write_rows
from children import exit_code_in_child
from kills import copied_at, killed_at
from trainings import final_weights, train, untimed_metrics

from luffy.errors import TrainingStopped, UserError
from luffy.learn.optim import Optimizer
from luffy.learn.policy import Policy
from luffy.metrics import Mean
from luffy.rollout.native import NativeEngine
from luffy.run_folder import checkpoint, recorder
from luffy.run_folder.checkpoint import CheckpointStore
from luffy.run_folder.recorder import read_json_lines
from luffy.run_folder.runs import load_run
from luffy.train import held_out, saving
from luffy.train.held_out import HeldOut
from luffy.train.loop import EvaluationInterrupted, Trainer

MOMENTS = {
    "rollout": (NativeEngine, "generate", 4),
    "update": (Policy, "update", 5),
    "between backward and optimizer step": (Optimizer, "step", 5),
    "before the step is logged": (recorder.Recorder, "log", 4),
    "model half written": (checkpoint, "save_file", 2),
    "checkpoint written but not renamed": (checkpoint, "flush_tree", 2),
    "checkpoint renamed but nothing tidied": (CheckpointStore, "tidy", 3),
    "best file": (saving, "write_atomically", 2),
    "evaluation on record but not kept": (held_out, "write_atomically", 3),
    # steps 2, 4 and 6 are saved: the last save is the third, after the start's own settling
    "last checkpoint not renamed": (checkpoint, "flush_tree", 3),
    "last checkpoint renamed but nothing tidied": (CheckpointStore, "tidy", 4),
    "last checkpoint not pointed at": (CheckpointStore, "_point_latest", 3),
    "last rotation": (CheckpointStore, "rotate", 3),
}
# of step 5: steps 2 and 4 are saved, and four evaluations roll out too
AFTER_TWO_SAVES = {
    "after two saves": (NativeEngine, "generate", 9),
    "evaluated but not saved": (checkpoint, "save_file", 2),
}


def resume_config(make_config, sums, name):
    return make_config(
        name=name,
        data={"eval": str(sums)},
        eval={"every": 2, "limit": 6},
        batch={"mini_batch": 3},
        algorithm={"kl_coef": 0.01},
        guidance={"n_prefix": 2, "strategy": "random", "min_ratio": 0.2, "max_ratio": 1.0},
        optim={"lr": 5e-3, "schedule": "cosine"},
        train={"steps": 6, "save_every": 2, "keep": 2},
    )


def of_steps(steps, cfg):
    return replace(cfg, train=replace(cfg.train, steps=steps))


def train_until_killed(cfg, moment):
    """In a child: SIGKILL at the moment."""
    with killed_at(*(MOMENTS | AFTER_TWO_SAVES)[moment]):
        train(cfg)


def train_and_kill(cfg, moment):
    assert exit_code_in_child(train_until_killed, cfg, moment) == -signal.SIGKILL, "the moment never came"


@pytest.fixture(scope="module")
def undisturbed(make_config_in, sums, tmp_path_factory):
    """The run that was never killed, made once. Beside it, what a kill in the middle of a save would leave."""
    torch.set_num_threads(1)
    cfg = resume_config(make_config_in(tmp_path_factory.mktemp("undisturbed")), sums, "undisturbed")
    with copied_at(*MOMENTS[IN_A_SAVE], cfg.folder, cfg.folder.parent / "copied"):
        train(cfg)
    return cfg


# The others are slow, so that the default suite stays short: a kill in each phase, and in each part of a save.
ALWAYS = "between backward and optimizer step"
IN_A_SAVE = "checkpoint written but not renamed"


@pytest.mark.parametrize("moment", [m if m == ALWAYS else pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS])
def test_killed_and_resumed_equals_undisturbed(make_config, sums, undisturbed, moment):
    killed = resume_config(make_config, sums, "killed")
    train_and_kill(killed, moment)
    resumed_equals(killed, undisturbed)


def test_a_run_with_one_optimizer_state_resumes_to_the_bit(make_config, sums, undisturbed):
    cfg = resume_config(make_config, sums, "little")
    little = replace(cfg, train=replace(cfg.train, keep_optimizer=1))
    checkpoints = little.folder / "checkpoints"
    with Trainer(little) as trainer:
        assert next(step for step, _ in trainer.steps() if step == 5)  # leaves the loop: step 5 is lost
    assert [p.name for p in sorted(checkpoints.glob("step-*"))] == ["step-000002", "step-000004"]
    assert [p.parent.name for p in checkpoints.glob("step-*/optimizer.safetensors")] == ["step-000004"]
    with pytest.raises(UserError, match=r"step-000002 has no optimizer state .*; start a new run with model\.path="):
        Trainer(replace(little, name="branch"), resume=str(checkpoints / "step-000002"))
    resumed_equals(little, undisturbed)
    assert [p.parent.name for p in checkpoints.glob("step-*/optimizer.safetensors")] == ["step-000006"]


def test_what_a_kill_in_a_save_leaves_is_resumed_and_equals_undisturbed(make_config, sums, undisturbed):
    killed = resume_config(make_config, sums, "killed")
    shutil.copytree(undisturbed.folder.parent / "copied", killed.folder, symlinks=True)
    assert [p.name for p in (killed.folder / "checkpoints").glob("step-*")] == ["step-000002"]
    resumed_equals(killed, undisturbed)


def resumed_equals(killed, undisturbed):
    train(killed)
    assert untimed_metrics(killed) == untimed_metrics(undisturbed)
    ours, theirs = final_weights(killed), final_weights(undisturbed)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    samples = [read_json_lines(cfg.folder / "samples.jsonl") for cfg in (killed, undisturbed)]
    assert samples[0] == samples[1]
    assert checkpoints_left(killed) == checkpoints_left(undisturbed)


def checkpoints_left(cfg):
    """Names of all that is there when a run is over, where ``latest`` points, and the best."""
    folder = cfg.folder / "checkpoints"
    names = sorted(p.name for p in folder.iterdir())
    assert not [n for n in names if n.startswith(".")]
    best = cfg.folder / "best.json"
    return names, os.readlink(folder / "latest"), best.read_text() if best.exists() else None


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_the_run_still_ends_the_same(make_config, sums, undisturbed):
    damaged = resume_config(make_config, sums, "damaged")
    train_and_kill(damaged, "after two saves")
    newest = max((damaged.folder / "checkpoints").glob("step-*")) / "model" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 0x10
    newest.write_bytes(data)
    train(damaged)
    assert untimed_metrics(damaged) == untimed_metrics(undisturbed)


@pytest.mark.parametrize(("sent", "called"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_ends_after_the_step_with_a_checkpoint_of_it(make_config, sums, undisturbed, sent, called):
    ended = resume_config(make_config, sums, "ended")
    before = signal.getsignal(sent)

    def end_the_third(step, _):
        if step == 3:
            os.kill(os.getpid(), sent)

    with Trainer(ended, on_step=end_the_third) as trainer, pytest.raises(TrainingStopped, match=f"step 3 by {called}"):
        trainer.train()
    assert signal.getsignal(sent) is before
    assert next(c.step for c in CheckpointStore(ended.folder / "checkpoints", 2)) == 3
    train(ended)
    assert untimed_metrics(ended) == untimed_metrics(undisturbed)


def test_a_second_ctrl_c_ends_at_once(make_config, sums, capfd):
    cfg = resume_config(make_config, sums, "hurried")
    before = signal.getsignal(signal.SIGINT)

    def twice(step, _):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with Trainer(cfg, on_step=twice) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is before
    assert list(CheckpointStore(cfg.folder / "checkpoints", 2)) == []
    assert "Ctrl-C again" in capfd.readouterr().err


def test_sigterm_in_the_last_step_ends_nothing_early(make_config, sums):
    cfg = of_steps(1, resume_config(make_config, sums, "whole"))
    with Trainer(cfg, on_step=lambda step, _: os.kill(os.getpid(), signal.SIGTERM)) as trainer:
        assert trainer.train().parent.name == "step-000001"


@pytest.mark.parametrize(("owner", "name", "step"), [
    (HeldOut, "evaluate_set", 0), (HeldOut, "evaluate_set", 4), (HeldOut, "evaluate_set", 6),
    (Policy, "update", 4), (Policy, "update", 6),
])  # fmt: skip
def test_an_evaluation_does_not_keep_a_stop_waiting_and_is_made_up_for(
    make_config, sums, undisturbed, monkeypatch, owner, name, step
):
    ended = resume_config(make_config, sums, "ended")
    original = getattr(owner, name)

    def terminated(*args, **kwargs):
        if trainer.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    with Trainer(ended) as trainer, monkeypatch.context() as patch:
        patch.setattr(owner, name, terminated)
        with pytest.raises(TrainingStopped, match=f"step {step} by SIGTERM"):
            trainer.train()
    assert [row["step"] for row in untimed_metrics(ended) if "val-core/accuracy" in row] == list(range(0, step, 2))
    train(ended)
    by_step = [{}, {}]
    for merged, cfg in zip(by_step, (ended, undisturbed), strict=True):
        for row in untimed_metrics(cfg):
            merged[row["step"]] = merged.get(row["step"], {}) | row
    assert by_step[0] == by_step[1]
    assert checkpoints_left(ended) == checkpoints_left(undisturbed)
    samples = [read_json_lines(cfg.folder / "eval_samples.jsonl") for cfg in (ended, undisturbed)]
    assert samples[0] == samples[1] and samples[0]


def test_a_best_step_found_when_an_evaluation_is_made_up_for_stays_the_best(make_config, sums, monkeypatch):
    cfg = resume_config(make_config, sums, "ended")
    cfg = replace(cfg, train=replace(cfg.train, keep=1))
    accuracies = {0: 0.95, 2: 0.2, 4: 0.3, 6: 0.9}  # of the base there is no checkpoint to keep

    def graded(*args, **kwargs):
        if trainer.progress.step == 6 and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
            args[-1](0, 1)
        return {"val-core/accuracy": Mean(accuracies[trainer.progress.step])}, []

    stopped = []
    monkeypatch.setattr(HeldOut, "evaluate_set", graded)
    with Trainer(cfg) as trainer, pytest.raises(TrainingStopped, match="step 6 by SIGTERM"):
        trainer.train()
    assert json.loads((cfg.folder / "best.json").read_text())["step"] == 4
    for _ in range(3):  # the evaluation is made up for once, and its outcome is not forgotten
        with Trainer(cfg) as trainer:
            trainer.train()
        assert json.loads((cfg.folder / "best.json").read_text()) == {"step": 6, "accuracy": 0.9}
        assert trainer.progress.best_step == 6
        assert [c.step for c in CheckpointStore(cfg.folder / "checkpoints", 1)] == [6]
    assert [row["step"] for row in untimed_metrics(cfg) if "val-core/accuracy" in row] == [0, 2, 4, 6]
    record = load_run(cfg.folder)
    assert [step for step, _ in record.series("critic/rewards/mean")] == [1, 2, 3, 4, 5, 6]
    assert record.series("val-core/accuracy")[-1] == (6, 0.9)


def test_a_stop_between_two_sets_records_no_samples_twice(make_config, sums, monkeypatch):
    def with_two_sets(name):
        cfg = of_steps(4, resume_config(make_config, sums, name))
        return replace(cfg, data=replace(cfg.data, eval_also={"again": str(sums)}))

    undisturbed, ended = with_two_sets("undisturbed"), with_two_sets("ended")
    train(undisturbed)
    original = HeldOut.evaluate_set

    def ends_after_the_first(held, name, *args):
        if name == "again" and trainer.progress.step == 2:
            raise AssertionError("the second set must not begin")
        made = original(held, name, *args)
        if trainer.progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return made

    with Trainer(ended) as trainer, monkeypatch.context() as patch:
        patch.setattr(HeldOut, "evaluate_set", ends_after_the_first)
        with pytest.raises(TrainingStopped, match="step 2 by SIGTERM"):
            trainer.train()
    train(ended)
    samples = [read_json_lines(cfg.folder / "eval_samples.jsonl") for cfg in (ended, undisturbed)]
    assert samples[0] == samples[1]


def test_a_stop_that_comes_too_late_leaves_evaluations_alone(make_config, sums):
    cfg = of_steps(1, resume_config(make_config, sums, "late"))
    with Trainer(cfg, on_step=lambda step, _: trainer.stop_soon("a wish")) as trainer:
        trainer.train()
        assert "val-core/accuracy" in trainer.evaluate()


def test_of_several_processes_none_leaves_an_evaluation(make_config, sums):
    with Trainer(resume_config(make_config, sums, "joined")) as trainer:
        trainer.stop_soon("a wish")
        with pytest.raises(EvaluationInterrupted):
            trainer.evaluate()
        trainer._stop.world = replace(trainer._stop.world, joined=True)
        assert "val-core/accuracy" in trainer.evaluate()


def test_a_failed_evaluation_is_made_up_for_and_its_step_is_on_record(make_config, sums, undisturbed, monkeypatch):
    broken = resume_config(make_config, sums, "broken")
    with Trainer(broken) as trainer, monkeypatch.context() as patch:
        original = HeldOut.evaluate_set
        patch.setattr(HeldOut, "evaluate_set", lambda *args: 1 / 0 if trainer.progress.step == 4 else original(*args))
        with pytest.raises(ZeroDivisionError):
            trainer.train()
    train(broken)
    assert [row["step"] for row in untimed_metrics(broken)] == [0, 1, 2, 3, 4, 4, 5, 6]
    accuracies = [[row["val-core/accuracy"] for row in untimed_metrics(cfg) if "val-core/accuracy" in row]
                  for cfg in (broken, undisturbed)]  # fmt: skip
    assert accuracies[0] == accuracies[1] and checkpoints_left(broken) == checkpoints_left(undisturbed)


def test_the_best_step_is_not_kept_when_nobody_asks(make_config, sums):
    cfg = resume_config(make_config, sums, "plain")
    cfg = replace(cfg, train=replace(cfg.train, save_every=4, keep=1, keep_best=False))
    train(cfg)
    assert [c.step for c in CheckpointStore(cfg.folder / "checkpoints", 1)] == [6]
    assert not (cfg.folder / "best.json").exists()


def test_a_folder_of_before_evaluated_json_is_asked_by_its_metrics(make_config, sums, undisturbed):
    """As runs left it that were made before: the evaluation of step 6 is missing, those of 2 and 4 are on record."""
    cfg = resume_config(make_config, sums, "old")
    shutil.copytree(undisturbed.folder, cfg.folder, symlinks=True)
    path, record = cfg.folder / "evaluated.json", cfg.folder / "metrics.jsonl"
    found = {int(step): accuracy for step, accuracy in json.loads(path.read_text()).items()}
    rows = read_json_lines(record)
    assert found == {row["step"]: row["val-core/accuracy"] for row in rows if "val-core/accuracy" in row}
    path.write_text("[]")
    with pytest.raises(UserError, match="evaluated.json: not a JSON object; delete it, and metrics.jsonl is read"):
        Trainer(cfg)
    path.unlink()
    with Trainer(cfg) as trainer:
        assert trainer.held_out.evaluated == found and not trainer.lacks_evaluation()
    without = [{k: v for k, v in row.items() if row["step"] < 6 or not k.startswith("val-")} for row in rows]
    write_rows(record, without)
    with Trainer(cfg) as trainer:
        assert trainer.lacks_evaluation()
        trainer.train()
    assert json.loads(path.read_text())["6"] == found[6]


def test_the_best_step_is_found_anew_where_a_resume_changes_what_is_measured(make_config, sums, monkeypatch):
    def bests_of(steps, **changed):
        """By step: the best on record, and the checkpoints that are there."""
        cfg = of_steps(steps, resume_config(make_config, sums, "changed"))
        cfg = replace(cfg, train=replace(cfg.train, save_every=1, keep=1), eval=replace(cfg.eval, **changed))
        found = {}

        def look(step, _):
            record = cfg.folder / "best.json"
            best = json.loads(record.read_text())["step"] if record.exists() else None
            found[step] = best, [c.step for c in CheckpointStore(cfg.folder / "checkpoints", 1)]

        with Trainer(cfg, on_step=look) as trainer:
            trainer.train()
        return found, " ".join(n for n in trainer.notices if "settings changed" in n)

    accuracies = {0: 0.0, 2: 1.0, 4: 0.5, 6: 0.1, 8: 0.2, 10: 0.15}
    figure = lambda held, name, tasks, step, *_: ({"val-core/accuracy": Mean(accuracies[step])}, [])  # noqa: E731
    monkeypatch.setattr(HeldOut, "evaluate_set", figure)
    assert bests_of(4)[0][4] == (2, [4, 2])
    found, said = bests_of(8, limit=3)
    assert found == {5: (2, [5, 2]), 6: (6, [6]), 7: (6, [7, 6]), 8: (8, [8])}  # the old one until there is another
    assert "eval.limit 6 -> 3" in said and "are measured otherwise than before: the best step is found anew" in said
    found, said = bests_of(10, limit=3)
    assert found[10] == (8, [10, 8]) and "train.steps 8 -> 10" in said and "anew" not in said


@pytest.mark.slow
def test_an_evaluation_after_the_checkpoint_is_forgotten_with_its_rows(make_config, sums):
    """A kill came between an evaluation and its checkpoint. The resumed run is stopped in that step's evaluation."""
    cfg = resume_config(make_config, sums, "killed")
    train_and_kill(cfg, "evaluated but not saved")
    assert "4" in json.loads((cfg.folder / "evaluated.json").read_text())
    with Trainer(cfg, on_step=lambda step, _: step == 3 and trainer.stop_soon("a wish")) as trainer:
        assert trainer.progress.step == 2 and 4 not in trainer.held_out.evaluated
        with pytest.raises(TrainingStopped):
            trainer.train()
    assert "4" not in json.loads((cfg.folder / "evaluated.json").read_text())


@pytest.fixture(scope="module")
def half_done(make_config_in, sums, tmp_path_factory):
    """A run that was ended after its fourth step of six."""
    cfg = resume_config(make_config_in(tmp_path_factory.mktemp("half")), sums, "half")

    def end(step, _):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with Trainer(cfg, on_step=end) as trainer, pytest.raises(TrainingStopped):
        trainer.train()
    return cfg


@pytest.mark.parametrize("state", ["as it was", "as it was, by its path", "stale", "partial", "the only one"])
def test_a_run_that_was_copied_with_its_links_followed_goes_on(half_done, undisturbed, tmp_path, state):
    """As ``cp -rL``, S3 and zip do: ``latest`` is a folder then."""
    copied = replace(half_done, out=str(tmp_path / "elsewhere"))
    shutil.copytree(half_done.folder, copied.folder)
    folder = copied.folder / "checkpoints"
    assert (folder / "latest").is_dir() and not (folder / "latest").is_symlink()
    if state == "stale":
        shutil.rmtree(folder / "latest")
        shutil.copytree(folder / "step-000002", folder / "latest")
    elif state == "partial":
        (folder / "latest" / "optimizer.safetensors").unlink()
    elif state == "the only one":
        for path in folder.glob("step-*"):
            shutil.rmtree(path)
    with Trainer(copied, resume=str(folder / "latest") if "path" in state else "auto") as trainer:
        assert trainer.progress.step == 4
        trainer.train()
    assert untimed_metrics(copied) == untimed_metrics(undisturbed)
    assert os.readlink(folder / "latest") == "step-000006"
