"""What a run shows before its first step is done."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from luffy.run_folder import console as shown
from luffy.run_folder.console import RunView, setting_up


class Heard(io.StringIO):
    """A file that lets a test wait for a text."""

    def __init__(self) -> None:
        super().__init__()
        self._grew = threading.Condition()

    def write(self, text: str) -> int:
        with self._grew:
            count = super().write(text)
            self._grew.notify_all()
        return count

    def wait_for(self, text: str) -> None:
        with self._grew:
            assert self._grew.wait_for(lambda: text in self.getvalue(), timeout=30), self.getvalue()


@pytest.fixture
def file(monkeypatch):
    monkeypatch.setattr(shown, "NEWS_EVERY_S", 0.01)
    return Heard()


def test_a_file_hears_what_the_set_up_does(file):
    with setting_up("run", Console(file=file)) as announce:
        file.wait_for("run  setting up, ")
        announce("loading the model m")
        file.wait_for("run  loading the model m, ")
    after = file.getvalue()
    assert "progress" not in {thread.name for thread in threading.enumerate()} and file.getvalue() == after


def test_a_process_that_does_not_speak_says_nothing(file):
    with setting_up("run", Console(file=file), speaks=False) as announce:
        announce("loading the model m")
    assert file.getvalue() == ""


def test_a_terminal_shows_the_set_up_live(file):
    with setting_up("run", Console(file=file, force_terminal=True, width=80)) as announce:
        announce("loading the model m")
        file.wait_for("run  loading the model m")


def test_a_slow_first_step_is_told_of_until_it_is_done(file):
    view = RunView("run", 3, 0, Console(file=file))
    file.wait_for("run  step 1/3  starting, ")
    view.phase("rollout")
    view.count(1, 64)
    file.wait_for("run  step 1/3  rollout 1/64, ")
    view.step(1, {"critic/rewards/mean": 0.5})
    assert file.getvalue().splitlines()[-1].startswith("run  step 1/3  reward 0.500")
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    view.close()


def test_a_run_that_ends_before_its_first_step_falls_silent(file):
    RunView("run", 3, 0, Console(file=file)).close()
    RunView("run", 3, 0, Console(quiet=True))  # of another process than the main one
    assert "progress" not in {thread.name for thread in threading.enumerate()}
