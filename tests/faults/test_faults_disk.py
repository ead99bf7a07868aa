"""A disk that is full or read-only, a clock that goes back, two trainings in one folder.

The small disk is a real file system (tmpfs), so the errors are the kernel's. Mounting needs root; without it these
tests are skipped. Nothing may be lost: once there is room again, the run ends as the undisturbed one.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys

import pytest
import torch
from children import Child, in_child
from faults_support import assert_all_equal, fill, filling, full_config, mounting
from trainings import train, untimed_metrics

from luffy import files
from luffy.cli import main
from luffy.config import to_yaml
from luffy.errors import UserError
from luffy.files import write_atomically
from luffy.report.html import write_report
from luffy.run_folder import changes, checkpoint, lock, recorder, trackers
from luffy.run_folder.recorder import read_json_lines
from luffy.run_folder.runs import load_run
from luffy.train import held_out, saving
from luffy.train.loop import Trainer
from luffy.train.weights import Export

# what is written, and the call before which the disk fills; after which, where negative
WRITES = {
    "record files at the start": (recorder.JsonLinesWriter, "__init__", 1),
    "config.yaml": (changes, "write_atomically", 1),
    "data.json": (changes, "write_atomically", 2),
    "samples.jsonl": (recorder.JsonLinesWriter, "write", 4),
    "metrics.jsonl": (recorder.Recorder, "log", 4),
    "weights": (Export, "write", 2),
    "optimizer state": (checkpoint, "save_file", 2),
    "state.json": (checkpoint, "save_file", -2),  # after the second call: the next write is state.json's
    "manifest.json": (checkpoint, "file_entry", 1),
    "evaluated.json": (held_out, "write_atomically", 2),
    "best.json": (saving, "write_atomically", 1),
}
TRACKER = {"TensorBoard": (trackers.TensorBoardTracker, "log", 2)}


mounted = pytest.fixture(mounting)


@pytest.fixture
def small_disk(mounted):
    return mounted("size=12m")


def luffy_train_in_child(cfg, desk, fills=None, what=None):
    """``luffy train`` in a child; (exit code, standard error). ``desk`` is a sound folder.

    ``fills`` is a disk that fills when ``what`` is written.
    """
    recipe = desk / "recipe.yaml"
    recipe.write_text(to_yaml(cfg))
    if fills is None:
        return in_child(run_luffy, "train", str(recipe))
    child = Child()
    child.start(run_luffy_on_a_disk_that_fills, fills, what, "train", str(recipe))
    try:
        return child.result()
    finally:
        child.end()


def run_luffy_on_a_disk_that_fills(disk, what, *arguments):
    filling(disk, *(WRITES | TRACKER)[what])
    return run_luffy(*arguments)


def run_luffy(*arguments):
    """(exit code, standard error) of the command, in this process."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        patch.setattr(sys, "argv", ["luffy", *arguments])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    return code, errors.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The undisturbed run, made once."""
    return {}


def undisturbed(finished, make_config, sums, tmp_path_factory):
    if not finished:
        out = tmp_path_factory.mktemp("undisturbed")
        cfg = full_config(make_config, sums, "undisturbed", out=str(out))
        in_child(train, cfg)
        finished["folder"] = cfg.folder
    return finished["folder"]


@pytest.mark.faults
@pytest.mark.parametrize("write", WRITES)
def test_a_full_disk_stops_with_one_line_and_nothing_is_lost(
    make_config, sums, small_disk, tmp_path, finished, tmp_path_factory, write
):
    torch.set_num_threads(1)
    whole = undisturbed(finished, make_config, sums, tmp_path_factory)
    cfg = full_config(make_config, sums, "run", out=str(small_disk))
    code, said = luffy_train_in_child(cfg, tmp_path, small_disk, write)
    assert (small_disk / "ballast").exists(), f"the moment never came\n{said}"
    assert (code, said.count("luffy: error: "), "Traceback" in said) == (1, 1, False), said
    assert "No space left on device" in said.splitlines()[-1], said
    (small_disk / "ballast").unlink()
    code, said = luffy_train_in_child(cfg, tmp_path)
    assert code == 0, said
    assert_all_equal(cfg.folder, whole)


@pytest.mark.faults
def test_a_tracker_on_a_full_disk_is_switched_off_and_the_run_goes_on(make_config, mounted, tmp_path):
    disk = mounted("size=64k")
    cfg = make_config(record={"tensorboard": True})
    cfg.folder.mkdir(parents=True)
    (cfg.folder / "tensorboard").symlink_to(disk)
    code, said = luffy_train_in_child(cfg, tmp_path, disk, "TensorBoard")
    assert code == 0, said
    assert said.count("TensorBoard failed and is off from step") == 1
    assert [row["step"] for row in read_json_lines(cfg.folder / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_file_replaced_on_a_full_disk_keeps_its_old_text(small_disk):
    path = small_disk / "report.html"
    write_atomically(path, "old")
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new" * 10_000)
    assert path.read_text() == "old"
    assert sorted(p.name for p in small_disk.iterdir()) == ["ballast", "report.html"]


def test_a_read_only_folder_is_refused_with_one_line_and_can_still_be_read(make_config, mounted, tmp_path):
    disk = mounted("size=12m")
    cfg = make_config(out=str(disk), train={"steps": 2})
    assert luffy_train_in_child(cfg, tmp_path)[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for more in (cfg, make_config(out=str(disk), name="another")):
        code, said = luffy_train_in_child(more, tmp_path)
        assert (code, said.count("\n")) == (2, 1), said
        assert said.startswith(f"luffy: error: cannot write the run folder {more.folder} (Read-only file system)"), said
    assert load_run(cfg.folder).steps == 2
    write_report([cfg.folder], tmp_path / "report.html")
    assert "run" in (tmp_path / "report.html").read_text()


def test_a_new_name_is_on_the_disk_too(tmp_path, monkeypatch):
    """A renamed file whose folder was not flushed may be gone after a power cut."""
    flushed = []
    monkeypatch.setattr(files, "flush_path", flushed.append)
    files.write_atomically(tmp_path / "a", "text")
    assert flushed[0].name.endswith(files.UNFINISHED) and flushed[1:] == [tmp_path]


def test_a_clock_that_goes_back_changes_nothing_but_the_times(make_config, monkeypatch):
    undisturbed, turned_back = make_config(name="undisturbed"), make_config(name="turned-back")
    train(undisturbed)
    clock = itertools.count(1_700_000_000, -3600)
    monkeypatch.setattr(recorder.time, "time", lambda: float(next(clock)))
    train(make_config(name="turned-back", train={"steps": 2}))
    for age, saved in enumerate(sorted((turned_back.folder / "checkpoints").glob("step-*"))):
        os.utime(saved, (1e9 - 1e6 * age,) * 2)  # the newest by step is the oldest by date
    train(turned_back)
    assert untimed_metrics(turned_back.folder) == untimed_metrics(undisturbed.folder)
    rows = read_json_lines(turned_back.folder / "metrics.jsonl")
    assert [row["time"] for row in rows] == sorted((row["time"] for row in rows), reverse=True)
    assert all(value >= 0 for row in rows for name, value in row.items() if name.startswith(("timing_s/", "perf/")))
    assert load_run(turned_back.folder).steps == 4


def test_a_second_training_in_the_same_folder_is_refused_and_the_first_goes_on(make_config, tmp_path):
    cfg = make_config()
    with Trainer(cfg) as first:
        code, said = luffy_train_in_child(cfg, tmp_path)
        assert (code, said.count("\n")) == (2, 1)
        assert (
            said == f"luffy: error: another training is running in {cfg.folder}; wait for it or choose another name=\n"
        )
        first.train()
    assert [row["step"] for row in read_json_lines(cfg.folder / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_lock_file_that_was_removed_meanwhile_locks_nothing(tmp_path, monkeypatch):
    """A run refused for bad input removes its lock file: who had opened that one must take the new one."""
    real, calls = lock.try_lock, itertools.count()

    def removed_before_the_first_lock(file):
        if next(calls) == 0:
            (tmp_path / ".lock").unlink()
        return real(file)

    monkeypatch.setattr(lock, "try_lock", removed_before_the_first_lock)
    held = lock.lock_folder(tmp_path)
    assert os.fstat(held.file.fileno()).st_ino == (tmp_path / ".lock").stat().st_ino
    with pytest.raises(UserError, match="another training is running"):
        lock.lock_folder(tmp_path)
