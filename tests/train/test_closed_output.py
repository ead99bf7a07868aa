"""Whoever reads a run's output may go away (`luffy train ... 2>&1 | head`): the run goes on."""

import os
import sys

import pytest
from rich.console import Console

from luffy.progress import lasting
from luffy.run_folder.console import RunView
from luffy.run_folder.recorder import read_json_lines
from luffy.trainer import Job


@pytest.fixture
def unread():
    """A pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        yield stream


def test_a_run_ends_as_usual_without_a_reader(make_config, monkeypatch, unread):
    monkeypatch.setattr(sys, "stderr", unread)
    monkeypatch.setattr(sys, "stdout", unread)
    cfg = make_config(train={"steps": 2})
    Job(cfg).alone()
    assert [row["step"] for row in read_json_lines(cfg.folder / "metrics.jsonl")] == [1, 2]
    assert (cfg.folder / "checkpoints" / "step-000002").is_dir()


def test_a_terminal_that_is_gone(unread):
    view = RunView("run", 3, 0, Console(file=lasting(unread), force_terminal=True))
    view.phase("rollout")
    view.count(1, 2)
    view.step(1, {"critic/rewards/mean": 0.5})
    view.say("a fact")
    view.warn("a warning")
    view.close()


def test_what_is_written_before_is_there(tmp_path):
    file = tmp_path / "log"
    with file.open("w") as stream:
        view = RunView("run", 3, 0, Console(file=lasting(stream)))
        view.say("a fact")
        view.close()
    assert file.read_text() == "a fact\n"
