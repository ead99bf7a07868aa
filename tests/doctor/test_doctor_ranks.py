"""`luffy doctor` over several gloo ranks, as under Ray: one of them is made to differ."""

import importlib.metadata
import json
import os
import socket
from pathlib import Path

import pytest
from ranks import run_ranks

from luffy.config import Config
from luffy.distributed.ray_launch import LineSender
from luffy.doctor import machine
from luffy.doctor.examination import MARK, Examination
from luffy.doctor.findings import Report
from luffy.schema import build

NO_GPU = not Path("/proc/driver/nvidia").exists()


def doctor_config(folder, **more):
    return build(Config, {"launch": "ray", "out": str(folder / "runs"), "model": {"device": "cpu"}, **more})


def examined(cfg, change, world):
    """The report of rank 0 and how often it came; ``change(rank)`` makes a rank differ and gives back what undoes it."""
    lines, undo = [], change(world.rank)
    machine.MOST_BYTES = 1 << 20
    try:
        Examination(cfg, 120.0).as_worker(out=LineSender(lines.append))
    finally:
        undo()
    sent = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    return [Report.received(report).as_json() for report in sent]


def unchanged(rank):
    return lambda: None


def of_another_machine(rank):
    """Rank 2 has another host name, another torch, another driver and another run folder."""
    if rank != 2:
        return unchanged(rank)
    name, version = socket.gethostname, importlib.metadata.version
    socket.gethostname = lambda: "node7"
    importlib.metadata.version = lambda package: "2.10.9" if package == "torch" else version(package)
    tool = Path("bin") / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 535.104.05\n")
    tool.chmod(0o755)
    os.environ["PATH"] = f"{tool.parent.resolve()}{os.pathsep}{os.environ['PATH']}"
    os.environ["GLOO_SOCKET_IFNAME"] = ""
    os.environ["NCCL_SOCKET_IFNAME"] = "ib9"

    def undo():
        socket.gethostname, importlib.metadata.version = name, version

    return undo


def statuses(report):
    return {line["check"]: line["status"] for line in report["checks"]}


def test_equal_ranks_agree_in_everything(tmp_path):
    (report,), *others = run_ranks(3, examined, doctor_config(tmp_path), unchanged)
    assert others == [[], []] and report["passed"] is True
    assert statuses(report) == dict.fromkeys(
        ("processes", "versions", "devices", "memory", "shared memory", "disk", "speed", "connection", "all-gather",
         "reduce-scatter", "gradient", "engine", "weight sync"), "ok",
    ) | {"ports": "skipped"}  # fmt: skip
    assert all(fact["gap"] < 1e-5 for fact in report["facts"]["gradient"].values())
    assert all(fact["float32"]["mean"] < 1e-5 for fact in report["facts"]["engine"].values())
    assert list(tmp_path.iterdir()) == []  # nothing is left, and no run folder is made


@pytest.mark.skipif(not NO_GPU, reason="the driver that is there is the one that is found")
def test_the_machine_that_differs_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (report,), *_ = run_ranks(3, examined, doctor_config(tmp_path), of_another_machine)
    here = socket.gethostname()
    assert report["machines"] == [{"name": here, "ranks": [0, 1]}, {"name": "node7", "ranks": [2]}]
    assert report["passed"] is False
    found = [line["found"] for line in report["checks"] if line["status"] == "failed"]
    torch = importlib.metadata.version("torch")
    assert found == [
        f"torch is not the same everywhere: 2.10.9 on rank 2 on node7; {torch} elsewhere",
        "GPU driver is not the same everywhere: 535.104.05 on rank 2 on node7; None elsewhere",
        f"NCCL_SOCKET_IFNAME=ib9 (there: {', '.join(name for _, name in socket.if_nameindex())}) on node7",
    ]
    assert all(line["remedy"] for line in report["checks"] if line["status"] == "failed")
    assert {"every machine sees the same run folder"} <= {line["found"] for line in report["checks"]}


def with_a_folder_of_its_own(rank):
    """Rank 1 is another machine, whose folder of the same name is on another disk."""
    if rank != 1:
        return unchanged(rank)
    name = socket.gethostname
    socket.gethostname = lambda: "node7"
    os.chdir(Path("elsewhere").resolve())

    def undo():
        socket.gethostname = name

    return undo


def test_a_machine_that_does_not_see_the_run_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    cfg = build(Config, {"launch": "ray", "out": "runs", "model": {"device": "cpu"}})
    (report,), _ = run_ranks(2, examined, cfg, with_a_folder_of_its_own)
    assert [line["found"] for line in report["checks"] if line["check"] == "disk" and line["status"] == "failed"] == [
        f"rank 1 on node7: the run folder is not the one of {socket.gethostname()}"
    ]
    connected = {line["check"]: line["found"] for line in report["checks"]}["ports"]
    assert connected == "each of 2 machines can connect to every other"


def test_a_config_that_cannot_be_sharded_is_a_failed_line_on_all_ranks(tmp_path):
    cfg = doctor_config(tmp_path, parallel={"workers": 3, "shard": "hybrid", "shard_size": 2})
    (report,), *_ = run_ranks(3, examined, cfg, unchanged)
    by_check = {line["check"]: line for line in report["checks"]}
    assert (
        by_check["gradient"]["status"] == "failed"
        and "does not divide the 3 processes" in by_check["gradient"]["found"]
    )
    assert by_check["engine"] == {"check": "engine", "status": "skipped", "found": "not reached", "remedy": ""}
