"""``launch: local | torchrun | ray`` as a user meets it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from luffy.config import Config
from luffy.distributed import launch as launching
from luffy.distributed import ray_launch
from luffy.distributed.launch import launch
from luffy.distributed.world import World, is_launched
from luffy.errors import ConfigError, TrainingStopped, UserError
from luffy.metrics import Mean
from luffy.run_folder.recorder import read_json_lines
from luffy.schema import build, to_dict
from luffy.trainer import Job


def luffy_process(*arguments):
    return subprocess.run([sys.executable, "-m", "luffy", *arguments], capture_output=True, text=True, timeout=240)


def overrides(cfg, *more):
    flat = [
        f"{k}.{n}={json.dumps(v)}"
        for k, s in to_dict(cfg).items()
        if isinstance(s, dict)
        for n, v in s.items()
        if simple(v)
    ]
    return [f"name={cfg.name}", f"out={cfg.out}", *flat, *more]


def simple(value):
    return value not in (None, "") and not isinstance(value, dict | list)


@pytest.mark.slow
def test_one_command_starts_the_processes_and_one_of_them_speaks(make_config):
    cfg = make_config(train={"steps": 2})
    result = luffy_process("train", "tiny/luffy", *overrides(cfg, "data.eval=null", "data.eval_also={}", "launch=torchrun", "parallel.workers=2"))  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("model ") == result.stdout.count("metrics ") == 1
    assert result.stderr.count("step 2/2") == 1
    assert [row["step"] for row in read_json_lines(cfg.folder / "metrics.jsonl")] == [1, 2]


@pytest.mark.slow
def test_a_mistake_is_said_once_and_gives_its_exit_code():
    result = luffy_process(
        "train", "tiny/luffy", "data.train=/no/such/file.jsonl", "launch=torchrun", "parallel.workers=2"
    )
    assert result.returncode == 2
    assert result.stderr.count("luffy: error:") == 1 and "/no/such/file.jsonl" in result.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallel": {"workers": 2}}, "launch=torchrun or ray"),
        ({"parallel": {"cpu_offload": True}}, r"set optim\.offload=true instead"),
        ({"parallel": {"gather": "mini_batch"}}, r"'parallel\.gather' \(mini_batch\); set parallel\.gather=auto"),
        ({"parallel": {"shard": "hybrid"}}, r"'parallel\.shard' \(hybrid\); set parallel\.shard=full"),
        ({"launch": "ray", "parallel": {"shard_size": 2}}, r"only with parallel\.shard=hybrid"),
        (
            {"launch": "ray", "parallel": {"workers": 3, "rollout_group": 2}},
            r"does not divide 'parallel\.workers' \(3\)",
        ),
        ({"launch": "torchrun", "model": {"lora": {}, "dtype": "bfloat16"}}, r"set model\.dtype=float32"),
        ({"launch": "ray", "optim": {"offload": True}}, r"set parallel\.cpu_offload=true"),
        ({"launch": "slurm"}, "must be one of local, torchrun, ray"),
    ],
)
def test_configs_that_cannot_be_honoured(values, message):
    with pytest.raises(ConfigError, match=message):
        build(Config, values)


class Asked:
    def __init__(self, **values):
        self.cfg = build(Config, values)
        self.ran = []

    def alone(self):
        self.ran.append("alone")

    def as_worker(self, *args):
        self.ran.append("worker")


def test_who_runs_what(monkeypatch):
    started = []
    monkeypatch.setattr(launching, "start_processes", lambda *given: started.append(given[:2]))
    local, many = Asked(), Asked(launch="torchrun", parallel={"workers": 3})
    launch(local, [])
    launch(many, ["train", "x"])
    assert local.ran == ["alone"] and many.ran == [] and started == [(3, ["train", "x"])]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert is_launched()
    launch(many, [])
    assert many.ran == ["worker"]
    with pytest.raises(ConfigError, match="add launch=torchrun"):
        launch(local, [])


def test_without_ray_the_launch_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match=r"pip install '\.\[ray\]'"):
        launch(Asked(launch="ray"), [])


def test_a_cluster_of_ones_own_gets_a_token_and_a_foreign_one_needs_its_own(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    environment = dict(PATH="/bin")
    monkeypatch.setattr(ray_launch.os, "environ", environment)
    monkeypatch.setattr(ray_launch.Path, "home", lambda: tmp_path)
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN"):
        ray_launch.secure("auto")
    ray_launch.secure(None)
    assert environment["RAY_AUTH_MODE"] == "token" and len(environment["RAY_AUTH_TOKEN"]) == 64
    ray_launch.secure("auto")  # it has one now
    environment.clear()
    environment["RAY_AUTH_MODE"] = "disabled"
    ray_launch.secure("auto")
    assert "RAY_AUTH_TOKEN" not in environment


def test_whole_lines_are_sent():
    sent = []
    sender = ray_launch.LineSender(sent.append)
    for part in ("step ", "1\nst", "ep 2\n\n"):
        sender.write(part)
    assert sent == ["step 1", "step 2", ""]


class Lost(Exception):
    """A worker is gone."""


class Actor:
    """A mailbox as Ray's workers see it."""

    def __init__(self):
        self.kept = ray_launch.Mailbox()

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self.kept, name))


@dataclass(frozen=True)
class LosesWorkers(Job):
    """A worker is lost in the step after ``lost_at``."""

    lost_at: int = 0

    def as_worker(self, on_step, out):
        def lose(step, values):
            on_step(step, values)
            if step == self.lost_at:
                raise Lost

        self._train(World(), lose, out)


@pytest.mark.parametrize("resume", ["auto", "never", "path"])
def test_workers_of_ray_in_place_of_lost_ones_go_on_whatever_resume_was_asked_for(make_config, monkeypatch, resume):
    """Before the first checkpoint of their own they begin as the lost ones did."""
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    train = SimpleNamespace(get_context=lambda: context, report=lambda values: None)
    ray = SimpleNamespace(get=lambda value: value, nodes=lambda: [], train=train)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = make_config(name="a", train={"steps": 2})
    Job(made).alone()
    resume = str(made.folder / "checkpoints" / "latest") if resume == "path" else resume
    cfg, mailbox = make_config(name="b", train={"steps": 6, "save_every": 4}), Actor()
    for lost_at in (3, 5):
        job = LosesWorkers(cfg, resume=resume, lost_at=lost_at)
        with pytest.raises(Lost):
            ray_launch.work({"job": job, "cwd": os.getcwd(), "mailbox": mailbox})
    ray_launch.work({"job": LosesWorkers(cfg, resume=resume), "cwd": os.getcwd(), "mailbox": mailbox})
    assert mailbox.kept.first_mistake is None
    begun = 3 if "latest" in resume else 1
    assert [row["step"] for row in read_json_lines(cfg.folder / "metrics.jsonl")] == [*range(begun, 7)]
    assert [line for line in mailbox.kept.lines if "resumed at step 4" in line]


def test_a_world_of_one_gives_back_what_it_gets():
    world = World()
    assert world.gather(5) == [5] and world.from_main("x") == "x" and world.is_main
    assert world.merge({"a": Mean(6.0, 3)}) == {"a": Mean(6.0, 3)}
    with pytest.raises(UserError, match="mistake"):
        world.on_main(lambda: (_ for _ in ()).throw(UserError("mistake")))


@pytest.mark.parametrize(
    ("number", "raised", "said"),
    [
        (
            signal.SIGTERM,
            TrainingStopped,
            "ended by SIGTERM, and its 2 processes with it; rerun the same command to resume",
        ),
        (signal.SIGINT, KeyboardInterrupt, None),
    ],
)
def test_a_signal_to_the_launcher_is_no_traceback(monkeypatch, number, raised, said):
    def signalled(*_):
        raise SignalException("Process 1 got signal", sigval=number)

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: signalled)
    with pytest.raises(raised, match=said):
        launching.start_processes(2, ["train", "recipe.yaml"])
