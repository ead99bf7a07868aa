import json
import os
import shutil

import pytest
import torch

from luffy.errors import UserError
from luffy.run_folder.checkpoint import Checkpoint, CheckpointStore, DamagedCheckpoint


def write_model(folder):
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"w" * 1000)


def make_store(tmp_path, keep=2, keep_optimizer=None):
    return CheckpointStore(tmp_path / "checkpoints", keep, keep_optimizer)


def save_step(s, step):
    return s.save(step, write_model, {"a": torch.arange(3.0)}, {"step": step})


def test_a_saved_checkpoint_reads_back_and_verifies(tmp_path):
    checkpoint = save_step(make_store(tmp_path), 5)
    checkpoint.verify()
    assert checkpoint.step == 5 and json.loads((checkpoint.path / "state.json").read_text()) == {"step": 5}
    assert checkpoint.tensors()["a"].tolist() == [0.0, 1.0, 2.0]
    assert os.stat(checkpoint.path / "optimizer.safetensors").st_mode & 0o777 == 0o644


def test_latest_names_the_newest(tmp_path):
    s = make_store(tmp_path)
    for step in (1, 2):
        save_step(s, step)
        s.tidy(best_step=None)
        assert (s.folder / "latest").resolve() == (s.folder / f"step-{step:06d}").resolve()
    assert [c.step for c in s] == [2, 1]


def test_a_checkpoint_under_another_name_has_no_step(tmp_path):
    checkpoint = save_step(make_store(tmp_path), 5)
    assert Checkpoint(checkpoint.path.rename(tmp_path / "kept")).step == -1


@pytest.fixture
def copied(tmp_path):
    """Checkpoints of the steps 1 and 2; ``latest`` is a folder, as copies that follow links leave it."""
    s = make_store(tmp_path)
    for step in (1, 2):
        s.save(step, write_model, {"a": torch.arange(3.0)}, {"progress": {"step": step}})
    shutil.copytree(s.folder / "step-000002", s.folder / "latest")
    return s


def checkpoint_names(s):
    return sorted(path.name for path in s.folder.iterdir())


def taken_in(s):
    """The step of the checkpoint that the copy was of, and what was said; ``latest`` is a link afterwards."""
    said = []
    found = s.take_in_copy(said.append)
    s.tidy(best_step=None)
    assert os.readlink(s.folder / "latest") == next(iter(s)).path.name
    return found and found.step, " ".join(said)


def test_a_copy_of_a_whole_checkpoint_is_removed(copied):
    assert Checkpoint(copied.folder / "latest").step == 2
    assert taken_in(copied) == (2, "") and checkpoint_names(copied) == ["latest", "step-000001", "step-000002"]


def test_a_copy_of_an_older_checkpoint_does_not_come_first(copied):
    copied.save(3, write_model, {"a": torch.arange(3.0)}, {"progress": {"step": 3}})
    assert taken_in(copied) == (2, "") and [c.step for c in copied] == [3, 2]


def test_a_copy_stands_in_for_a_lost_checkpoint(copied):
    shutil.rmtree(copied.folder / "step-000002")
    step, said = taken_in(copied)
    assert step == 2 and said.endswith("latest is a folder, not a link: taken as step-000002")
    next(iter(copied)).verify()
    assert checkpoint_names(copied) == ["latest", "step-000001", "step-000002"]


def test_a_copy_stands_in_for_a_damaged_checkpoint(copied):
    (copied.folder / "step-000002" / "model" / "weights").write_bytes(b"x" * 1000)
    step, said = taken_in(copied)
    assert step == 2 and "its hash differs); kept as damaged-step-000002" in said
    next(iter(copied)).verify()
    assert checkpoint_names(copied) == ["damaged-step-000002", "latest", "step-000001", "step-000002"]


@pytest.mark.parametrize("lost", ["model/weights", "manifest.json", "state.json"])
def test_a_partial_copy_is_kept_and_not_used(copied, lost):
    (copied.folder / "latest" / lost).unlink()
    step, said = taken_in(copied)
    assert step is None and said.endswith("; it is a copy and not used") and [c.step for c in copied] == [2, 1]
    assert checkpoint_names(copied) == ["copied-latest-1", "latest", "step-000001", "step-000002"]


@pytest.mark.parametrize("own", ["notes.txt", "model/README.md"])
def test_what_someone_wrote_into_a_copy_is_kept(copied, own):
    (copied.folder / "copied-latest-1").mkdir()  # of another time
    (copied.folder / "latest" / own).write_text("mine")
    assert taken_in(copied) == (None, "")
    assert (copied.folder / "copied-latest-2" / own).read_text() == "mine"


def test_nothing_is_overwritten(tmp_path):
    s = make_store(tmp_path)
    save_step(s, 5)
    with pytest.raises(UserError, match="never overwritten"):
        save_step(s, 5)


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    s = make_store(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save_step(s, step)
        s.rotate(best_step=1)
    assert [c.step for c in s] == [4, 3, 1]


def test_a_kill_in_the_middle_of_a_save_leaves_the_previous_one_and_is_swept(tmp_path):
    s = make_store(tmp_path)
    save_step(s, 1)

    def dies(folder):
        write_model(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        s.save(2, dies, {}, {})
    assert [c.step for c in s] == [1] and s.newest_whole(pytest.fail).step == 1
    save_step(s, 2)
    assert not list(s.folder.glob(".*"))


@pytest.mark.parametrize("name", ["model/weights", "optimizer.safetensors", "state.json", "manifest.json"])
def test_any_flipped_byte_is_found_and_the_one_before_is_used(tmp_path, name):
    s = make_store(tmp_path)
    save_step(s, 1)
    path = save_step(s, 2).path / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    messages = []
    assert s.newest_whole(messages.append).step == 1
    assert name in messages[0] and "damaged-step-000002" in messages[0]
    save_step(s, 2)  # the name is free again


def test_a_missing_file_is_damage_and_a_foreign_one_is_named(tmp_path):
    s = make_store(tmp_path)
    checkpoint = save_step(s, 1)
    assert checkpoint.verify() == []
    (checkpoint.path / "extra.bin").write_bytes(b"x")
    (checkpoint.path / "model" / ".DS_Store").write_bytes(b"x")
    assert checkpoint.verify() == ["extra.bin", "model/.DS_Store"]
    messages = []
    assert s.newest_whole(messages.append) == checkpoint
    assert "extra.bin, model/.DS_Store" in messages[0]
    (checkpoint.path / "model" / "weights").unlink()
    with pytest.raises(DamagedCheckpoint, match="lacks its file model/weights"):
        checkpoint.verify()


@pytest.mark.parametrize(
    "name", ["model/adapter_config.json", "optimizer/shard-1.safetensors", "optimizer/._shard.safetensors"]
)
def test_a_foreign_file_that_a_loader_would_read_is_damage(tmp_path, name):
    checkpoint = save_step(make_store(tmp_path), 1)
    (checkpoint.path / name).parent.mkdir(exist_ok=True)
    (checkpoint.path / name).write_bytes(b"x")
    with pytest.raises(DamagedCheckpoint, match=f"holds {name}.*remove it"):
        checkpoint.verify()


def test_a_file_of_the_system_that_comes_and_goes_is_not_counted_on(tmp_path):
    """NFS renames a deleted file that is still open to .nfs*; it is gone soon."""

    def write(folder):
        write_model(folder)
        (folder / "model" / ".nfs0001").write_bytes(b"x")

    checkpoint = make_store(tmp_path).save(1, write, {}, {})
    assert checkpoint.verify() == ["model/.nfs0001"]
    (checkpoint.path / "model" / ".nfs0001").unlink()
    assert checkpoint.verify() == []


def test_manifest_without_files_is_damage(tmp_path):
    checkpoint = save_step(make_store(tmp_path), 1)
    (checkpoint.path / "manifest.json").write_text(json.dumps([]))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        checkpoint.verify()


def three_of_which_the_newest_resumes(tmp_path):
    s = make_store(tmp_path, keep=2, keep_optimizer=1)
    for step in (1, 2, 3):
        save_step(s, step)
        s.tidy(best_step=1)
    return s


def test_optimizer_state_stays_in_the_newest_checkpoints_only(tmp_path):
    s = three_of_which_the_newest_resumes(tmp_path)
    assert [(c.step, (c.path / "optimizer.safetensors").exists()) for c in s] == [(3, True), (2, False), (1, False)]
    for checkpoint in s:
        assert checkpoint.verify() == [] and (checkpoint.model / "weights").exists()
    assert s.newest_whole(pytest.fail).step == 3
    s.keep_optimizer = 2  # what is gone stays gone, and nothing breaks
    save_step(s, 4)
    s.tidy(best_step=1)
    assert [(c.path / "optimizer.safetensors").exists() for c in s] == [True, True, False]


def test_a_checkpoint_without_optimizer_state_is_not_resumed(tmp_path):
    s = three_of_which_the_newest_resumes(tmp_path)
    (s.folder / "step-000003" / "model" / "weights").write_bytes(b"other")
    with pytest.raises(DamagedCheckpoint) as raised:
        s.newest_whole(pytest.fail)
    assert "step-000003: model/weights is not what was saved" in str(raised.value)
    model = s.folder / "step-000002" / "model"
    assert f"step-000002 has no optimizer state (train.keep_optimizer removes it), so no run resumes from it; start a new run with model.path={model}" in str(raised.value)  # fmt: skip


def test_a_kill_while_optimizer_state_is_removed_is_mended(tmp_path):
    s = make_store(tmp_path)
    checkpoint = save_step(s, 1)
    for name in ("shard-1.safetensors", "shard-2.safetensors"):
        (checkpoint.shards / name).parent.mkdir(exist_ok=True)
        (checkpoint.shards / name).write_bytes(b"x")
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())["files"]
    kept = {name: entry for name, entry in manifest.items() if name != "optimizer.safetensors"}
    (checkpoint.path / "manifest.json").write_text(json.dumps({"files": kept}, indent=1))
    # As the kill left it: nothing of the leftover is read, so it is not damage.
    assert checkpoint.verify() == ["optimizer.safetensors", "optimizer/shard-1.safetensors", "optimizer/shard-2.safetensors"]  # fmt: skip
    save_step(s, 2)
    s.keep_optimizer = 1
    s.tidy(best_step=None)
    assert checkpoint.verify() == [] and not checkpoint.shards.exists()


def test_a_damaged_or_linked_checkpoint_keeps_its_optimizer_state(tmp_path):
    s = make_store(tmp_path, keep=3, keep_optimizer=1)
    damaged, moved = save_step(s, 1).path, save_step(s, 2).path
    (damaged / "manifest.json").write_text("{")
    moved.rename(tmp_path / "other-disk")
    moved.symlink_to(tmp_path / "other-disk")
    save_step(s, 3)
    s.tidy(best_step=None)
    assert (damaged / "optimizer.safetensors").exists() and (moved / "optimizer.safetensors").exists()
