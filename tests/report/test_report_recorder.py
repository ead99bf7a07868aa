import sys
from types import SimpleNamespace

import pytest

from luffy.errors import ConfigError
from luffy.report.recorder import Recorder, check_trackers
from luffy.train.loop import Trainer


@pytest.fixture
def wandb_runs(monkeypatch):
    """What the ``wandb`` package was asked to begin; the package itself speaks to a server."""
    begun = []
    run = SimpleNamespace(log=lambda values, step: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **asked: begun.append(asked) or run))
    return begun


def record(cfg, start_step=-1):
    cfg.folder.mkdir(parents=True, exist_ok=True)
    Recorder(cfg, start_step, pytest.fail).close()


def test_two_users_of_one_name_write_into_two_runs_of_wandb(make_config, wandb_runs, monkeypatch, tmp_path):
    for user in ("ann", "bob"):
        (tmp_path / user).mkdir()
        monkeypatch.chdir(tmp_path / user)
        record(make_config(out="runs", name="mine", record={"wandb": True}))
    ids = [asked["id"] for asked in wandb_runs]
    assert ids[0] != ids[1]
    assert all(asked["name"] == "mine" and asked["resume"] == "allow" for asked in wandb_runs)


def test_a_resumed_run_goes_on_in_its_run_of_wandb_wherever_it_lies(make_config, wandb_runs, tmp_path):
    cfg = make_config(name="mine", record={"wandb": True})
    record(cfg)
    record(cfg, start_step=3)
    (tmp_path / "runs").rename(tmp_path / "moved")
    record(make_config(out=str(tmp_path / "moved"), name="mine", record={"wandb": True}), start_step=3)
    assert len({asked["id"] for asked in wandb_runs}) == 1


def test_trackers_are_settled_before_the_first_step(make_config, monkeypatch):
    both = make_config(record={"tensorboard": True, "wandb": True})
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"record\.wandb=true, but the package wandb is missing: pip install"):
        check_trackers(both)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(api=SimpleNamespace(api_key=None)))
    with pytest.raises(ConfigError, match="nobody is logged in: run `wandb login`"):
        check_trackers(both)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check_trackers(both) == []
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(api=SimpleNamespace(api_key="x")))
    assert check_trackers(both) == []
    monkeypatch.setattr("luffy.report.recorder.find_spec", lambda name: None)
    (said,) = check_trackers(both)
    assert said.startswith("TensorBoard is off: the package tensorboard is missing")
    both.folder.mkdir(parents=True)
    assert Recorder(make_config(record={"tensorboard": True}), -1, pytest.fail).trackers == {}


def test_a_missing_tracker_ends_a_run_before_it_writes(make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    cfg = make_config(record={"wandb": True})
    with pytest.raises(ConfigError, match="wandb is missing"):
        Trainer(cfg)
    assert not cfg.folder.exists()
