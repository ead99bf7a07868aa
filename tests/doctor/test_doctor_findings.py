"""What is made of the measurements: who differs, what fails with which remedy, and what a bug report must not say."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from luffy.doctor import machine
from luffy.doctor.findings import Cluster, Line, Report, scrub, spans, who_differs
from luffy.doctor.machine import (
    judge_devices,
    judge_memory,
    judge_speed,
    judge_storage,
    judge_versions,
)
from luffy.doctor.network import judge_bandwidth, judge_ports
from luffy.doctor.numerics import judge_engine, judge_gradient

ROOT = Path(__file__).parents[2]
GIB = 2**30
TESTED = machine.tested_versions()
ALONE = Cluster(["a"])
THREE = Cluster(["node0", "node0", "node1"])
DEVICE = {
    "wanted": "auto", "device": "cpu", "cpu": "Xeon", "cores": 8, "threads": 4, "has_driver": False, "driver": None,
    "driver_cuda": None, "torch_cuda": None, "visible": None, "nccl": None, "settings": {},
}  # fmt: skip
GPU = DEVICE | {
    "device": "cuda", "has_driver": True, "driver": "570.86", "driver_cuda": "12.8", "torch_cuda": "12.8",
    "nccl": "2.28.9", "gpu": "H200", "index": 0, "uuid": "u0", "gib": 140.1, "capability": "9.0", "gpus": 1,
}  # fmt: skip
MEMORY = {"host_free": 64 * GIB, "host_total": 128 * GIB, "owner": "this machine", "shm": 8 * GIB, "gpu_free": None}


def failed(lines):
    return [line.found for line in lines if line.status == "failed"]


def test_the_table_of_tested_versions_is_that_of_the_constraints():
    command = [sys.executable, ".ci/tested_versions.py", "constraints.txt", "constraints-ray.txt"]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "luffy" / "doctor" / "tested.txt").read_text() == table
    assert {"torch", "transformers", "ray", "antlr4-python3-runtime", "pyyaml"} <= TESTED.keys()


def test_ranks_are_named_with_their_machines():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert Cluster(["a", "a", "b", "a"]).name([3, 1, 2]) == "ranks 1, 3 on a, rank 2 on b"


def test_the_rank_that_differs_is_named_with_both_values():
    assert who_differs(THREE, {0: "2.11", 1: "2.11", 2: "2.11"}) == ""
    assert who_differs(THREE, {0: "2.11", 1: "2.11", 2: "2.10"}) == "2.10 on rank 2 on node1; 2.11 elsewhere"
    both = who_differs(Cluster(["a", "b"]), {0: "2.11", 1: "2.10"})
    assert both == "2.11 on rank 0 on a; 2.10 on rank 1 on b"


def versions(**packages):
    return {"luffy": "0.1.0", "python": "3.11.7", "system": "Linux x86_64", "packages": {**TESTED, **packages}}


def test_versions_that_were_not_tested_are_a_warning_and_another_antlr_is_a_failure():
    assert [line.status for line in judge_versions(ALONE, {0: versions(torch=TESTED["torch"] + "+cpu")})] == ["ok"]
    _, other = judge_versions(ALONE, {0: versions(torch="2.10.1")})
    assert other.status == "warning" and "torch 2.10.1 (tested: " in other.found and "constraints.txt" in other.remedy
    _, wrong = judge_versions(ALONE, {0: versions(**{"antlr4-python3-runtime": "4.9.3"})})
    assert wrong.status == "failed" and wrong.remedy == "pip install 'antlr4-python3-runtime==4.13.2'"


def test_a_machine_with_another_torch_or_without_a_package_is_named():
    odd = versions(torch="2.10.0")
    del odd["packages"]["peft"]
    lines = judge_versions(THREE, {0: versions(), 1: versions(), 2: odd})
    assert failed(lines) == [
        f"torch is not the same everywhere: 2.10.0 on rank 2 on node1; {TESTED['torch']} elsewhere"
    ]
    assert any(line.status == "warning" and "peft" in line.found and "None on rank 2" in line.found for line in lines)


@pytest.mark.parametrize(
    ("change", "found", "remedy"),
    [
        ({"has_driver": True}, "this torch was built without CUDA", "install torch with CUDA"),
        ({"wanted": "cuda"}, "there is no NVIDIA driver", "model.device=cpu"),
        ({"has_driver": True, "torch_cuda": "13.0", "visible": ""}, "hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
        ({"has_driver": True, "torch_cuda": "13.0", "driver": "550.1"}, "sees no GPU", "update the NVIDIA driver"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_a_failure_with_its_remedy(change, found, remedy):
    line, cpu = judge_devices(ALONE, {0: DEVICE | change})
    assert line.status == "failed" and found in line.found and remedy in line.remedy and cpu.status == "ok"


def test_a_cpu_alone_is_fine():
    assert [line.status for line in judge_devices(ALONE, {0: DEVICE})] == ["ok"]
    assert [line.status for line in judge_devices(ALONE, {0: DEVICE | {"has_driver": True, "wanted": "cpu"}})] == ["ok"]


def test_a_machine_with_another_gpu_or_driver_is_named():
    fine = {rank: GPU | {"uuid": f"u{rank}"} for rank in range(3)}
    assert [(line.check, line.status) for line in judge_devices(THREE, fine)] == [
        ("devices", "ok"), ("driver", "ok"), ("NCCL", "ok"),
    ]  # fmt: skip
    assert failed(judge_devices(ALONE, {0: GPU | {"torch_cuda": "13.0"}})) == [
        "driver 570.86, CUDA up to 12.8; torch was built for CUDA 13.0"
    ]
    assert failed(judge_devices(ALONE, {0: GPU | {"nccl": None}})) == ["this torch has no NCCL"]
    odd = fine | {2: fine[2] | {"gpu": "A100", "gib": 80.0, "driver": "535.1"}}
    assert failed(judge_devices(THREE, odd)) == [
        "GPU is not the same everywhere: A100, 80 GiB on rank 2 on node1; H200, 140 GiB elsewhere",
        "GPU driver is not the same everywhere: 535.1 on rank 2 on node1; 570.86 elsewhere",
    ]


def test_ranks_that_share_a_gpu_are_named():
    lines = judge_devices(THREE, {0: GPU, 1: GPU, 2: GPU | {"uuid": "u2"}})
    (warning,) = [line for line in lines if line.status == "warning"]
    assert warning.found.startswith("ranks 0-1 on node0 share a GPU")


def test_memory():
    def statuses(cluster=THREE, **change):
        facts = {rank: MEMORY | change for rank in range(len(cluster.hosts))}
        return {line.check: line.status for line in judge_memory(cluster, facts)}

    assert statuses() == {"memory": "ok", "shared memory": "ok"}
    assert statuses(host_free=GIB)["memory"] == "warning"
    assert statuses(shm=2**26)["shared memory"] == "failed"
    assert statuses(ALONE, shm=2**26)["shared memory"] == "ok"  # one process passes nothing through it
    assert statuses(shm=None)["shared memory"] == "skipped"
    used = {"gpu_free": 70 * GIB, "gpu_total": 140 * GIB}
    assert statuses(ALONE, **used, uuid="u")["GPU memory"] == "warning"
    assert statuses(**used, uuid="u")["GPU memory"] == "ok"  # the ranks themselves share it


def test_a_slow_gpu_is_named():
    fast = {"flops": 6e14, "bandwidth": 4e12, "on_gpu": True}
    slow = fast | {"flops": 2e14}
    facts = {rank: fast | {"uuid": f"u{rank}"} for rank in range(2)} | {2: slow | {"uuid": "u2"}}
    (line,) = judge_speed(THREE, facts)
    assert line.status == "warning" and "slow: rank 2 on node1 (33% of the median)" in line.found
    (line,) = judge_speed(THREE, {rank: fact | {"on_gpu": False} for rank, fact in facts.items()})
    assert line.status == "ok"


@pytest.mark.parametrize(
    ("free", "speed", "status"),
    [(1e12, 1e9, "ok"), (5e9, 1e9, "warning"), (1e8, 1e9, "failed"), (1e12, 1e7, "warning")],
)
def test_disk(free, speed, status):
    (line,) = judge_storage(ALONE, {0: {"folder": "/runs", "free": free, "speed": speed}})
    assert line.status == status and bool(line.remedy) == (status != "ok")


def test_a_machine_with_another_run_folder_is_named():
    facts = {rank: {"folder": "/runs", "free": 1e12, "speed": 1e9, "shared": rank == 0} for rank in (0, 2)}
    assert failed(judge_storage(THREE, facts)) == ["rank 2 on node1: the run folder is not the one of node0"]


def test_ports():
    nothing = {"unreached": [], "absent": [], "servers": {}}
    assert [line.status for line in judge_ports(ALONE, {0: nothing})] == ["skipped"]
    assert [line.status for line in judge_ports(THREE, {0: nothing, 2: nothing})] == ["ok"]
    facts = {
        0: nothing | {"servers": {"http://x:8000": "port 8000: Connection refused", "http://y:8000": ""}},
        2: nothing | {"unreached": ["node0: port 4711: timed out"], "absent": ["NCCL_SOCKET_IFNAME=ib9 (there: lo)"]},
    }
    assert failed(judge_ports(THREE, facts)) == [
        "NCCL_SOCKET_IFNAME=ib9 (there: lo) on node1",
        "node1 cannot connect to node0: port 4711: timed out",
        "http://x:8000: port 8000: Connection refused",
    ]


def test_a_slow_link_between_gpus_is_a_warning():
    rates = {"all-gather": {"bytes": 2**28, "rate": 1e8}, "reduce-scatter": {"bytes": 2**28, "rate": 1e11}}
    assert [line.status for line in judge_bandwidth(THREE, {0: {"on_gpu": True, **rates}})] == ["warning", "ok"]
    assert [line.status for line in judge_bandwidth(THREE, {0: {"on_gpu": False, **rates}})] == ["ok", "ok"]


def gradient(norm=1.0, gap=1e-7):
    return {"norm": norm, "gap": gap, "parameter": "lm_head", "compared": "all ranks"}


def test_a_wrong_gradient_fails_and_a_rank_that_computes_another_one_is_named():
    assert [line.status for line in judge_gradient(THREE, dict.fromkeys(range(3), gradient()))] == ["ok"]
    for gap in (0.3, float("nan")):
        (line,) = judge_gradient(THREE, {0: gradient(), 1: gradient(), 2: gradient(gap=gap)})
        assert line.status == "failed" and "largest in lm_head" in line.found and "do not train" in line.remedy
    for norm in (1.01, float("nan")):
        (line,) = judge_gradient(THREE, {0: gradient(), 1: gradient(), 2: gradient(norm)})
        assert line.status == "failed" and line.found.startswith("rank 2 on node1 alone computes another gradient")


def test_an_engine_that_is_far_from_the_trainer_fails():
    near, far = ({"mean": mean, "max": 2 * mean, "tokens": 9, "sync_s": 0.1, "sync_bytes": 10**9} for mean in (1e-6, 1))
    lines = judge_engine(THREE, {0: {"float32": near}, 1: {"float32": near}, 2: {"float32": far}})
    assert [(line.check, line.status) for line in lines] == [("engine", "failed"), ("weight sync", "ok")]
    assert "rank 2 on node1" in lines[0].found and "10 GB/s" in lines[1].found
    alone = judge_engine(ALONE, {0: {"float32": near | {"sync_s": None}}})
    assert [(line.check, line.status) for line in alone] == [("engine", "ok"), ("weight sync", "skipped")]


def make_report():
    lines = [
        Line(
            "disk", "failed", "/home/ann/runs on gpu17.lab.example", "ssh ann@10.0.3.7 and look at /data/ann/runs/x.txt"
        ),
        Line("versions", "ok", "torch 2.11.0, NCCL 2.28.9, driver 570.86.15"),
    ]
    facts = {"devices": {0: {"uuid": "GPU-1", "gpu": "H200"}, 1: {"at": "fe80:1:2:3::7", "host": "gpu18"}}}
    return Report("0.1.0", "ray", Cluster(["gpu17", "gpu18"]), lines, facts, ["ann", "gpu17.lab.example"], 12.34)


def test_the_anonymous_form_has_no_names_addresses_or_paths():
    text = json.dumps(make_report().anonymous().as_json())
    assert not any(word in text for word in ("ann", "gpu1", "lab", "10.0", "/home", "/data", "GPU-1", "fe80"))
    assert "torch 2.11.0, NCCL 2.28.9, driver 570.86.15" in text and "H200" in text
    assert [machine["name"] for machine in make_report().anonymous().as_json()["machines"]] == ["machine0", "machine1"]


def test_a_short_name_is_replaced_as_a_word_only():
    assert scrub("a rank on a, a-b, xay", {"a": "machine0"}) == "machine0 rank on machine0, a-b, xay"


def test_a_report_survives_json_and_fails_by_one_line():
    there = json.loads(json.dumps(make_report().as_json()))
    assert there["passed"] is False and there["machines"][1] == {"name": "gpu18", "ranks": [1]}
    again = Report.received(json.loads(json.dumps(asdict(make_report()))))
    assert again.as_json() == there and again.private == make_report().private
