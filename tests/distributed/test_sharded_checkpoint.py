"""Checkpoints of sharded runs: any number of processes resumes them, and only whole ones."""

import os
import signal
import threading

import pytest
import torch
from features import note_seen
from ranks import exit_codes_of_ranks, run_ranks
from safetensors import safe_open
from trainings import assert_same_metrics, assert_same_weights, final_weights, train, untimed_metrics

from luffy.errors import UserError
from luffy.run_folder import background_saver
from luffy.run_folder.checkpoint import Checkpoint, CheckpointStore
from luffy.train.weights import Export
from luffy.trainer import Trainer

OPTIM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}


def sharded_config(make_config, name, steps=6, **changes):
    return make_config(name=name, optim=OPTIM, train={"steps": steps, "save_every": 2, "keep": 5}, **changes)


def train_on(count, cfg):
    """0: an ordinary run of one process, without a world."""
    train(cfg) if count == 0 else run_ranks(count, train, cfg)


IN_PARTS = {"max_tokens_per_step": 6, "n": 3}  # responses are under way when a checkpoint is taken


@pytest.mark.parametrize(
    ("counts", "rollout"),
    [
        ((2, 1, 4), {}),
        pytest.param((2, 0, 2), {}, marks=pytest.mark.slow),
        pytest.param((2, 0, 2), IN_PARTS, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_number_of_processes(make_config, counts, rollout):
    torch.set_num_threads(1)
    whole = sharded_config(make_config, "whole", rollout=rollout)
    train(whole)
    for count, steps in zip(counts, (2, 4, 6), strict=True):
        cfg = sharded_config(make_config, "moved", steps, rollout=rollout)
        train_on(count, cfg)
    assert_same_metrics(untimed_metrics(cfg), untimed_metrics(whole))
    assert_same_weights(final_weights(cfg), final_weights(whole))
    ours, theirs = (Checkpoint(c.folder / "checkpoints" / "step-000006").tensors() for c in (cfg, whole))
    assert_same_weights(ours, theirs)
    note_seen("resume with another number of processes", "torchrun, gloo", ", ".join(map(str, counts)))


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4, "dropout": 0.3}}], ids=["plain", "dropout"])
def test_the_same_number_of_processes_resumes_to_the_bit(make_config, model):
    whole, parts = (
        sharded_config(make_config, "whole", 4, model=model),
        sharded_config(make_config, "parts", 2, model=model),
    )
    train_on(2, whole)
    train_on(2, parts)
    train_on(2, sharded_config(make_config, "parts", 4, model=model))
    assert untimed_metrics(parts) == untimed_metrics(whole)
    assert all(torch.equal(a, b) for a, b in zip(final_weights(parts).values(), final_weights(whole).values(), strict=True))  # fmt: skip


def test_files_are_shards_without_pickles_and_damage_is_found(make_config):
    cfg = sharded_config(make_config, "run", 4)
    train_on(2, cfg)
    newest = Checkpoint(cfg.folder / "checkpoints" / "step-000004")
    newest.verify()
    endings = {p.suffix for p in newest.path.rglob("*") if p.is_file()}
    assert endings == {".safetensors", ".json", ".md"}
    shards = sorted(newest.shards.iterdir())
    assert len(shards) == 2
    name = "model.layers.0.mlp.down_proj.weight/exp_avg"
    for shard in shards:  # each holds its half of the rows
        with safe_open(shard, framework="pt") as file:
            assert file.get_slice(name).get_shape() == [16, 64]
    data = bytearray(shards[1].read_bytes())
    data[-9] ^= 4
    shards[1].write_bytes(data)
    messages = []
    assert CheckpointStore(newest.path.parent, 2).newest_whole(messages.append).step == 2
    assert shards[1].name in messages[0]


def test_training_goes_on_while_a_checkpoint_is_written(make_config):
    """The first checkpoint is held up until step 3 is over; it still has the weights of step 2."""
    slow, plain = sharded_config(make_config, "slow", 4), sharded_config(make_config, "plain", 4)
    train_on(2, plain)
    run_ranks(2, train_with_a_held_up_checkpoint, slow)
    for step in ("step-000002", "step-000004"):
        ours, theirs = (Checkpoint(c.folder / "checkpoints" / step) for c in (slow, plain))
        ours.verify()
        assert all(torch.equal(v, theirs.tensors()[k]) for k, v in ours.tensors().items())
        assert (ours.model / "model.safetensors").read_bytes() == (theirs.model / "model.safetensors").read_bytes()


def train_with_a_held_up_checkpoint(cfg, world):
    step_three_is_over, write = threading.Event(), Export.write

    def hold_up(export, folder):
        assert step_three_is_over.wait(60), "training waited for the checkpoint"
        write(export, folder)

    def on_step(step, values):
        if step == 3:
            assert not (cfg.folder / "checkpoints" / "step-000002").exists()
            step_three_is_over.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Export, "write", hold_up)
        train(cfg, world, on_step=on_step)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_while_a_checkpoint_is_written(make_config, victim):
    """SIGKILL to one process between its shards and the name of the checkpoint; the run resumes from the one before."""
    whole, killed = sharded_config(make_config, "whole", 4), sharded_config(make_config, "killed", 4)
    train_on(2, whole)
    codes = exit_codes_of_ranks(2, train_and_die_in_second_save, killed, victim)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] != 0
    folder = killed.folder / "checkpoints"
    assert [c.step for c in CheckpointStore(folder, 2)] == [2]
    train_on(2, killed)
    assert untimed_metrics(killed) == untimed_metrics(whole)
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-000002", "step-000004"]


def train_and_die_in_second_save(cfg, victim, world):
    start, saves = background_saver.start_saving, []

    def deadly(tensors, folder, group):
        saves.append(folder)
        if len(saves) == 2 and world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(tensors, folder, group)

    background_saver.start_saving = deadly
    train(cfg, world)


def test_a_user_mistake_found_by_the_main_process_reaches_all(make_config):
    cfg = sharded_config(make_config, "run", 2)
    train_on(2, cfg)
    said = run_ranks(2, mistake_of_starting_again, cfg)
    assert said[0] == said[1] and "already holds a run" in said[0]


def mistake_of_starting_again(cfg, world):
    with pytest.raises(UserError) as mistake:
        Trainer(cfg, resume="never", world=world)
    return str(mistake.value)
