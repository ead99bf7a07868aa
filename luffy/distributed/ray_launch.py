"""``launch: ray``: Ray Train places the workers on machines, watches them, and starts them again when one is lost.

The only file that imports Ray. A worker that dies takes its group with it; Ray starts a new group, and the trainer
in it resumes from the newest valid checkpoint by itself, as it does after any kill. Errors that the user must
fix are not tried again.
"""

from __future__ import annotations

import io
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from luffy.config import Config
from luffy.distributed.launch import Launchable
from luffy.errors import ConfigError, TrainingStopped, UserError, needing
from luffy.plugins import leave_current_folder, load_plugins
from luffy.progress import lasting

MISTAKES = {"user": UserError, "stopped": TrainingStopped}
POLL_S = 0.5
GRACE_S = 10.0  # after a worker's mistake, for the others to end by themselves


def run_on_ray(job: Launchable, show: Callable[[list[str]], bool] | None = None) -> None:
    """Run the job on a cluster and wait for its end; a mistake that a worker found is raised here.

    ``show`` gets the lines of the workers twice a second, in place of standard error; True: no more is needed of them.
    """
    show = show or print_lines
    secure(job.cfg.ray.address)
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")  # machines that autoscale need minutes
    ray = import_ray()
    started_here = not ray.is_initialized()
    if started_here:
        connect(ray, job.cfg)
    try:
        mailbox, on_gpus = start_mailbox(ray), uses_gpus(ray, job.cfg)
        if on_gpus and job.cfg.ray.gpus_per_worker <= 0.5:
            print_lines(["warning: ray.gpus_per_worker lets workers share a GPU, which is for tests; set it to 1"])
        trainer = build_trainer(job, mailbox, on_gpus)
        fit = in_background(trainer.fit)
        mistaken_since = None
        while not fit.done():
            wait([fit], timeout=POLL_S)
            if show(ray.get(mailbox.take_lines.remote())):
                return
            if mistaken_since is None and ray.get(mailbox.mistake.remote()) is not None:
                mistaken_since = time.monotonic()
            if mistaken_since is not None and time.monotonic() - mistaken_since > GRACE_S:
                break  # the others wait for the one that has ended; Ray would take them for lost and try again
        if mistake := ray.get(mailbox.mistake.remote()):
            raise MISTAKES[mistake[0]](mistake[1])
        fit.result()
    finally:
        if started_here:
            ray.shutdown()


def in_background(act: Callable[[], Any]) -> Future[Any]:
    """Run ``act`` in a daemon thread, so that an interrupt of the command need not wait: the workers end with their
    driver."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def start_mailbox(ray: Any) -> Any:
    """Start the mailbox on the machine of the command, so that it is not lost with another one."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()


def build_trainer(job: Launchable, mailbox: Any, on_gpus: bool) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    cfg = job.cfg
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    return TorchTrainer(
        work,
        train_loop_config={"job": job, "cwd": os.getcwd(), "mailbox": mailbox},
        torch_config=TorchConfig(backend=backend, timeout_s=round(cfg.parallel.timeout_s)),
        scaling_config=ScalingConfig(
            num_workers=cfg.parallel.workers,
            use_gpu=on_gpus,
            resources_per_worker={
                "CPU": cfg.ray.cpus_per_worker,
                **({"GPU": cfg.ray.gpus_per_worker} if on_gpus else {}),
            },
            placement_strategy="SPREAD" if cfg.ray.spread else "PACK",
        ),
        run_config=RunConfig(
            name=secrets.token_hex(4),  # never that of an earlier attempt: what to resume is ours to say
            storage_path=str((cfg.folder / "ray").resolve()),
            failure_config=FailureConfig(max_failures=cfg.ray.max_failures),
        ),
    )


def import_ray() -> Any:
    with needing("launch=ray needs Ray", "ray", ConfigError):
        import ray
        import ray.train
    return ray


def secure(address: str | None) -> None:
    """Set a token: Ray's ports listen on every address and run any code for every caller. Must come before Ray is
    imported; a given RAY_AUTH_MODE is respected."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] != "token" or has_token():
        return
    if address is not None:
        raise ConfigError(
            f"ray.address={address}: no token to enter that cluster; set RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to "
            f"the one it was started with, or RAY_AUTH_MODE=disabled for a cluster without one"
        )
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def has_token() -> bool:
    named = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    return bool(named) or (Path.home() / ".ray" / "auth_token").is_file()


def connect(ray: Any, cfg: Config) -> None:
    """Connect to the cluster of ``ray.address``, or start one that lives as long as this command."""
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    if cfg.ray.address is None:
        # Cores are only bookkeeping for Ray: a small machine may still run several workers.
        cores = math.ceil(cfg.parallel.workers * cfg.ray.cpus_per_worker) + 1
        options |= {"num_cpus": max(cores, os.cpu_count() or 1), "include_dashboard": False}
    try:
        ray.init(address=cfg.ray.address, **options)
    except ConnectionError as error:
        raise ConfigError(f"ray.address={cfg.ray.address}: no cluster answers ({error})") from None


def uses_gpus(ray: Any, cfg: Config) -> bool:
    """Whether the workers compute on GPUs: ``model.device`` says so, or is auto and there are enough."""
    gpus, workers, part = ray.cluster_resources().get("GPU", 0), cfg.parallel.workers, cfg.ray.gpus_per_worker
    enough = gpus * math.floor(1 / part) >= workers
    if cfg.model.device == "cuda" and not enough and cfg.ray.address is None:
        each = "" if part == 1 else f" of {part:g} GPU each"
        raise ConfigError(
            f"'parallel.workers' is {workers}{each}, but this machine has {gpus:.0f} GPUs; lower it, or set "
            f"ray.gpus_per_worker below 1 to let workers share a GPU (for tests)"
        )
    return cfg.model.device == "cuda" or (cfg.model.device == "auto" and enough)


def work(settings: dict[str, Any]) -> None:
    """Entry of every worker. A normal return ends the run; an exception asks Ray for another try."""
    import ray
    from ray import train

    os.chdir(settings["cwd"])  # paths of a recipe are relative to where the command was given
    leave_current_folder()  # Ray puts it first on the path of its workers
    job, mailbox = settings["job"], settings["mailbox"]
    lines = LineSender(lambda line: ray.get(mailbox.say.remote(line)))

    def report(step: int, values: dict[str, float]) -> None:
        ray.get(mailbox.note_step.remote())
        train.report({"step": step, **values})

    if train.get_context().get_world_rank() == 0:
        nodes = len({node["NodeID"] for node in ray.nodes() if node["Alive"]})
        lines.write(f"{train.get_context().get_world_size()} workers started, {nodes} machine(s) in the cluster\n")
    try:
        load_plugins(job.cfg.plugins)
        if ray.get(mailbox.has_stepped.remote()):  # in place of workers that were lost
            job = job.again()
        job.as_worker(report, lines)
    except (UserError, TrainingStopped) as error:
        kind = "user" if isinstance(error, UserError) else "stopped"
        ray.get(mailbox.report_mistake.remote(kind, str(error)))


class LineSender(io.TextIOBase):
    """A text file whose whole lines are sent away."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send, self._rest = send, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._send(line)
        return len(text)


class Mailbox:
    """Actor that outlives the workers and keeps their lines and mistakes for the command."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.first_mistake: tuple[str, str] | None = None
        self.stepped = False

    def say(self, line: str) -> None:
        self.lines.append(line)

    def take_lines(self) -> list[str]:
        taken, self.lines = self.lines, []
        return taken

    def note_step(self) -> None:
        self.stepped = True

    def has_stepped(self) -> bool:
        return self.stepped

    def report_mistake(self, kind: str, text: str) -> None:
        self.first_mistake = self.first_mistake or (kind, text)

    def mistake(self) -> tuple[str, str] | None:
        return self.first_mistake


def print_lines(lines: list[str]) -> bool:
    for line in lines:
        print(line, file=lasting(sys.stderr), flush=True)
    return False
