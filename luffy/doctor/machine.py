"""Checks of one machine: packages, devices, driver, memory, disk. Over several they name the one that differs."""

from __future__ import annotations

import ctypes
import getpass
import importlib.metadata
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from luffy._version import __version__
from luffy.doctor.findings import Cluster, Facts, Line, judged, who_differs
from luffy.doctor.watch import Context, device_index
from luffy.models.machine import Machine, available_cores, memory_of_machine

GIB = 2**30
SHM = Path("/dev/shm")
SMALL_SHM = GIB  # NCCL passes data between GPUs of a machine through it; a container gets 64 MiB unless told
FREE_OF_GPU = 0.9  # below it another process uses the GPU
FREE_HOST = 4 * GIB
SLOW = 0.7  # of the ranks' median speed
TESTED = Path(__file__).with_name("tested.txt")  # `make docs` writes it from the constraints
# Another version of these silently changes verdicts of the math reward.
EXACT = ("math-verify", "antlr4-python3-runtime")
MUST_AGREE = ("luffy", "torch", "transformers", "CUDA", "NCCL", "GPU", "GPU driver")


# ---- ranks


def measure_identity(context: Context) -> dict[str, Any]:
    """Publish this rank's host name, and read the others'."""
    host = socket.gethostname()
    context.board.put(f"host/{context.rank}", host)
    context.watch.meet()
    context.hosts[:] = [context.board.wait(f"host/{rank}") for rank in range(context.size)]
    return {"host": host, "private": _private_words(context)}


def _private_words(context: Context) -> list[str]:
    """Words that the anonymous report must not contain."""
    folder = context.cfg.folder
    words = {socket.gethostname(), socket.getfqdn(), str(Path.home()), os.getcwd(), str(folder), str(folder.resolve())}
    with suppress(OSError, KeyError):  # a container's user may have no name
        words.add(getpass.getuser())
    words |= {os.environ[name] for name in ("MASTER_ADDR", "USER", "LOGNAME") if os.environ.get(name)}
    return sorted(words - {"", "/", "localhost", "runs"})


def judge_identity(cluster: Cluster, facts: Facts) -> list[Line]:
    counts = [f"{len(cluster.ranks_of(host))} on {host}" for host in cluster.machines]
    return [Line("processes", "ok", ", ".join(counts))]


# ---- versions


def tested_versions() -> dict[str, str]:
    """Tested version by package name, lower case."""
    pairs = (line.split("==") for line in TESTED.read_text(encoding="utf-8").splitlines())
    return {name.lower(): version for name, version in pairs}


def measure_versions(context: Context) -> dict[str, Any]:
    """Versions of luffy, Python and the packages that it was tested with."""
    packages = {}
    for name in tested_versions():
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    system = f"{platform.system()} {platform.machine()}"
    return {"luffy": __version__, "python": platform.python_version(), "system": system, "packages": packages}


def judge_versions(cluster: Cluster, facts: Facts) -> list[Line]:
    """Fail other versions of EXACT packages, and differences between ranks; warn of versions that were not tested."""
    mine, tested = facts[min(facts)], tested_versions()
    found = f"luffy {mine['luffy']}, Python {mine['python']}, {mine['system']}"
    lines = [Line("versions", "ok", f"{found}, torch {mine['packages'].get('torch')}")]
    other = {name: v for name, v in mine["packages"].items() if v.partition("+")[0] != tested.get(name, v)}
    wrong = [name for name in other if name in EXACT]
    if wrong:
        here, there = (", ".join(f"{name} {versions[name]}" for name in wrong) for versions in (other, tested))
        fix = "pip install " + " ".join(f"'{name}=={tested[name]}'" for name in wrong)
        lines.append(Line("versions", "failed", f"{here}, which gives other verdicts than {there}", fix))
    rest = [f"{name} {v} (tested: {tested[name]})" for name, v in other.items() if name not in wrong]
    if rest:
        fix = "if something fails, install the tested versions: pip install --constraint constraints.txt ."
        lines.append(Line("versions", "warning", f"tested with others: {', '.join(rest)}", fix))
    flat = {rank: {"luffy": one["luffy"], "python": one["python"], **one["packages"]} for rank, one in facts.items()}
    return lines + _differences(cluster, "versions", flat)


def _differences(cluster: Cluster, check: str, of_ranks: Mapping[int, dict[str, Any]]) -> list[Line]:
    """A line for each value that is not the same on all ranks."""
    names = dict.fromkeys(name for mine in of_ranks.values() for name in mine)
    lines = []
    for name in names:
        differs = who_differs(cluster, {rank: mine.get(name) for rank, mine in of_ranks.items()})
        if differs:
            status: Any = "failed" if name in MUST_AGREE else "warning"
            fix = f"use the same {name} on every machine"
            lines.append(Line(check, status, f"{name} is not the same everywhere: {differs}", fix))
    return lines


# ---- devices, driver, NCCL


def measure_devices(context: Context) -> dict[str, Any]:
    """The device in use, driver, CUDA and NCCL."""
    facts: dict[str, Any] = {
        "wanted": context.cfg.model.device,
        "device": context.device,
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "has_driver": Path("/proc/driver/nvidia").exists(),
        "driver": _driver_version(),
        "driver_cuda": _cuda_of_driver(),
        "torch_cuda": torch.version.cuda,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "nccl": None,
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))},
    }
    facts["settings"].pop("NCCL_HOSTID", None)  # one of a rank's own, where ranks share a GPU
    if context.device == "cuda":
        index = device_index()
        properties = torch.cuda.get_device_properties(index)
        facts |= {
            "gpu": properties.name,
            "index": index,
            "uuid": gpu_uuid(),
            "gib": round(properties.total_memory / GIB, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "gpus": torch.cuda.device_count(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        }
    return facts


def gpu_uuid() -> str:
    """The GPU's own name, by which ranks that share one are known."""
    return str(torch.cuda.get_device_properties(device_index()).uuid)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _driver_version() -> str | None:
    """Version of NVIDIA's kernel driver, by its file in /proc or by nvidia-smi."""
    file = Path("/proc/driver/nvidia/version")
    if file.exists() and (found := re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read_text())):
        return found[0]
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return shown[0] if shown and re.fullmatch(r"[\d.]+", shown[0]) else None


def _cuda_of_driver() -> str | None:
    """The newest CUDA that the driver supports."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def judge_devices(cluster: Cluster, facts: Facts) -> list[Line]:
    """Fail a GPU that cannot be used and devices that differ; warn of ranks that share a GPU."""
    lines = [line for rank, fact in facts.items() if (line := _unused_gpu(cluster, rank, fact))]
    gpus = {rank: fact for rank, fact in facts.items() if fact["device"] == "cuda"}
    mine = gpus[min(gpus)] if gpus else facts[min(facts)]
    if gpus:
        here = f"{len({fact['uuid'] for fact in gpus.values()})} x {mine['gpu']}, {mine['gib']} GiB"
        lines.append(Line("devices", "ok", f"{here}, compute capability {mine['capability']}"))
        lines += _driver_lines(mine)
    else:
        found = f"no GPU is used; {mine['cpu']}, {mine['cores']} cores, {mine['threads']} threads a process"
        lines.append(Line("devices", "ok", found))
    if shared := sharing_ranks(gpus):
        text = f"{cluster.name(shared)} share a GPU: NCCL exchanges their data over sockets"
        lines.append(Line("devices", "warning", text, "use one process a GPU for training; this is for tests"))
    values = {rank: _device_values(fact) for rank, fact in facts.items()}
    return list(dict.fromkeys(lines)) + _differences(cluster, "devices", values)


def sharing_ranks(facts: Facts) -> list[int]:
    """Ranks whose GPU another rank uses too."""
    uuids = [fact.get("uuid") for fact in facts.values()]
    return [rank for rank, fact in facts.items() if fact.get("uuid") and uuids.count(fact["uuid"]) > 1]


def _unused_gpu(cluster: Cluster, rank: int, fact: Any) -> Line | None:
    """A line if a GPU is there, or was asked for, and torch cannot use it."""
    if fact["device"] == "cuda" or fact["wanted"] == "cpu" or not (fact["has_driver"] or fact["wanted"] == "cuda"):
        return None
    where = "" if len(cluster.hosts) == 1 else f" on {cluster.hosts[rank]}"
    if not fact["has_driver"] and fact["driver"] is None:
        return Line(
            "devices", "failed", f"model.device=cuda, but there is no NVIDIA driver{where}",
            "install the driver, give the container its GPUs (docker run --gpus all), or set model.device=cpu",
        )  # fmt: skip
    if fact["torch_cuda"] is None:
        return Line(
            "devices", "failed", f"there is an NVIDIA driver{where}, but this torch was built without CUDA",
            "install torch with CUDA (pip install torch from PyPI), or set model.device=cpu",
        )  # fmt: skip
    if fact["visible"] in ("", "-1"):
        return Line("devices", "failed", f"CUDA_VISIBLE_DEVICES hides every GPU{where}", "unset CUDA_VISIBLE_DEVICES")
    text = (
        f"torch for CUDA {fact['torch_cuda']} sees no GPU{where}; driver {fact['driver']}, CUDA {fact['driver_cuda']}"
    )
    return Line("devices", "failed", text, "update the NVIDIA driver or install a torch for its CUDA; see nvidia-smi")


def _driver_lines(fact: Any) -> list[Line]:
    driver = f"driver {fact['driver'] or 'of unknown version'}, CUDA up to {fact['driver_cuda'] or '?'}"
    old = fact["driver_cuda"] and fact["torch_cuda"] and _major(fact["driver_cuda"]) < _major(fact["torch_cuda"])
    update = f"update the NVIDIA driver, or install a torch for CUDA {fact['driver_cuda']}"
    settings = "".join(f", {name}={value}" for name, value in fact["settings"].items())
    nccl = "this torch has no NCCL" if fact["nccl"] is None else f"{fact['nccl']}{settings}"
    install = "install a torch with NCCL (the Linux builds of PyPI have it), or run one process (launch=local)"
    return [
        judged("driver", f"{driver}; torch was built for CUDA {fact['torch_cuda']}", (old, "failed", "", update)),
        judged("NCCL", nccl, (fact["nccl"] is None, "failed", "", install)),
    ]


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _device_values(fact: Any) -> dict[str, Any]:
    values = {"GPU": f"{fact['gpu']}, {fact['gib']:.0f} GiB" if "gpu" in fact else "none"}
    values |= {"GPU driver": fact["driver"], "CUDA": fact["torch_cuda"], "NCCL": fact["nccl"], "CPU": fact["cpu"]}
    return values | {f"the variable {name}": value for name, value in fact["settings"].items()}


# ---- memory and shared memory


def measure_memory(context: Context) -> dict[str, Any]:
    """Free memory of host and GPU, and the size of shared memory."""
    free, total, owner = memory_of_machine(False)
    facts: dict[str, Any] = {"host_free": free, "host_total": total, "owner": owner, "shm": None, "gpu_free": None}
    if SHM.is_dir():
        size = os.statvfs(SHM)
        facts["shm"] = size.f_frsize * size.f_blocks
        facts["shm_free"] = size.f_frsize * size.f_bavail
    if context.device == "cuda":
        facts["gpu_free"], facts["gpu_total"] = torch.cuda.mem_get_info(device_index())
        facts["uuid"] = gpu_uuid()
    return facts


def judge_memory(cluster: Cluster, facts: Facts) -> list[Line]:
    """Warn of little free memory, fail too little shared memory."""
    least = min(facts, key=lambda rank: facts[rank]["host_free"])
    host = facts[least]
    found = f"{host['host_free'] / GIB:.1f} of {host['host_total'] / GIB:.1f} GiB of {host['owner']} free"
    found += f" (least: {cluster.hosts[least]})" if len(cluster.machines) > 1 else ""
    fix = "end other processes, or give the container more memory: each process reads the whole model at the start"
    lines = [judged("memory", found, (host["host_free"] < FREE_HOST, "warning", "", fix))]
    gpus = {rank: fact for rank, fact in facts.items() if fact["gpu_free"] is not None}
    lines += [_gpu_memory(cluster, gpus)] if gpus else []
    return [*lines, _shared_memory(cluster, facts)]


def _gpu_memory(cluster: Cluster, gpus: Facts) -> Line:
    shared = sharing_ranks(gpus)  # whose other processes are ranks too
    used = [r for r, fact in gpus.items() if fact["gpu_free"] < FREE_OF_GPU * fact["gpu_total"] and r not in shared]
    worst = gpus[min(gpus, key=lambda rank: gpus[rank]["gpu_free"])]
    found = f"{worst['gpu_free'] / GIB:.1f} of {worst['gpu_total'] / GIB:.1f} GiB free"
    fix = "end the other processes on these GPUs (nvidia-smi lists them)"
    return judged(
        "GPU memory", found, (used, "warning", f"; other processes use the GPUs of {cluster.name(used)}", fix)
    )


def _shared_memory(cluster: Cluster, facts: Facts) -> Line:
    known = {rank: fact["shm"] for rank, fact in facts.items() if fact["shm"] is not None}
    if not known:
        return Line("shared memory", "skipped", "this system has no /dev/shm")
    least = min(known, key=lambda rank: known[rank])
    found = f"{known[least] / GIB:.2f} GiB in /dev/shm"
    small = known[least] < SMALL_SHM and any(len(cluster.ranks_of(host)) > 1 for host in cluster.machines)
    where = f" on {cluster.hosts[least]}, where processes need 1 GiB"
    fix = "enlarge it: docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory"
    return judged("shared memory", found, (small, "failed", where, fix))


# ---- speed


def measure_speed(context: Context) -> dict[str, Any]:
    """Operations and bytes per second of matrix products and copies."""
    on_gpu = context.device == "cuda"
    device = torch.device("cuda", device_index()) if on_gpu else torch.device("cpu")
    machine = Machine.measure(device, torch.bfloat16 if on_gpu else torch.float32)
    if on_gpu:
        torch.cuda.empty_cache()  # ranks may share the GPU
    uuid = gpu_uuid() if on_gpu else None
    return {"flops": machine.flops, "bandwidth": machine.bandwidth, "on_gpu": on_gpu, "uuid": uuid}


def judge_speed(cluster: Cluster, facts: Facts) -> list[Line]:
    """Warn of a slow GPU, which holds up all others. Ranks on CPUs share them, so their speeds tell nothing."""
    rates = sorted(fact["flops"] / 1e12 for fact in facts.values())
    median = rates[len(rates) // 2]
    found = f"{rates[0]:.3g}{f' to {rates[-1]:.3g}' if len(rates) > 1 else ''} TFLOP/s in matrix products, "
    found += f"{min(fact['bandwidth'] for fact in facts.values()) / 1e9:.3g} GB/s in copies"
    slow = [rank for rank, fact in facts.items() if fact["on_gpu"] and fact["flops"] / 1e12 < SLOW * median]
    named = f"; slow: {cluster.name(slow)} ({rates[0] / median:.0%} of the median)"
    fix = "look for heat, a power limit or other jobs there (nvidia-smi -q -d PERFORMANCE)"
    return [judged("speed", found, (slow and not sharing_ranks(facts), "warning", named, fix))]


# ---- the disk of the run folder: space, speed, and whether all machines see the same one


CHUNK = 1 << 24
MOST_BYTES = 1 << 28
MOST_S = 5.0  # of writing; flushing what is written comes on top
LITTLE_SPACE, NO_SPACE = 20e9, 1e9  # bytes
SLOW_DISK = 50e6  # bytes a second
PATIENCE_S = 10.0  # until a file that another machine wrote shows: network file systems remember what was absent


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: the doctor makes no run folder."""
    folder = folder.resolve()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def measure_storage(context: Context) -> dict[str, Any] | None:
    """Free space and speed, by one rank of each machine. The main rank leaves a mark that the others look for."""
    if context.rank not in context.leaders:
        return None
    folder = existing(context.cfg.folder)
    mark = folder / f".luffy-doctor-{secrets.token_hex(8)}"
    facts: dict[str, Any] = {"folder": str(folder), "free": shutil.disk_usage(folder).free, "speed": None}
    try:
        facts["speed"] = write_speed(mark)
        if len(set(context.hosts)) > 1:
            facts["shared"] = _sees_mark(context, mark)
    finally:
        mark.unlink(missing_ok=True)
    return facts


def write_speed(file: Path) -> float:
    """Bytes a second, flushed to the disk."""
    chunk = os.urandom(CHUNK)
    started, written = time.perf_counter(), 0
    with file.open("wb", buffering=0) as out:
        while written < MOST_BYTES and time.perf_counter() - started < MOST_S:
            written += out.write(chunk)
        os.fsync(out.fileno())
    return written / (time.perf_counter() - started)


def _sees_mark(context: Context, mark: Path) -> bool:
    """Whether this machine sees the main rank's file; the main rank waits until all have looked."""
    if context.rank == 0:
        context.board.put("mark", mark.name)
        context.watch.meet()
        for leader in context.leaders[1:]:
            context.board.wait(f"looked/{leader}")
        return True
    context.watch.meet()
    theirs = mark.with_name(context.board.wait("mark"))
    until = time.monotonic() + min(PATIENCE_S, context.limit_s / 2)
    while not (there := theirs.exists()) and time.monotonic() < until:
        time.sleep(0.2)
        os.listdir(theirs.parent)  # makes NFS look again
    context.board.put(f"looked/{context.rank}", True)
    return there


def judge_storage(cluster: Cluster, facts: Facts) -> list[Line]:
    """Judge the least free space, the slowest disk, and whether all machines see one run folder."""
    least, slowest = (min(facts, key=lambda rank, key=key: facts[rank][key]) for key in ("free", "speed"))  # type: ignore[misc]
    free, speed = facts[least]["free"], facts[slowest]["speed"]
    found = f"{free / 1e9:.1f} GB free, {speed / 1e6:.0f} MB/s written in {facts[least]['folder']}"
    found += f" ({cluster.name([least])})" if len(facts) > 1 else ""
    larger = "set out=FOLDER on a larger disk: a checkpoint takes about 16 bytes a weight, and train.keep + 1 are kept"
    lines = [
        judged(
            "disk",
            found,
            (free < NO_SPACE, "failed", "", "free some space, or set out=FOLDER on another disk"),
            (free < LITTLE_SPACE, "warning", "", larger),
            (speed < SLOW_DISK, "warning", "", "set out=FOLDER on a faster disk, or save seldom (train.save_every)"),
        )
    ]
    blind = [rank for rank, fact in facts.items() if fact.get("shared") is False]
    if blind:
        text = f"{cluster.name(blind)}: the run folder is not the one of {cluster.hosts[0]}"
        lines.append(Line("disk", "failed", text, "set out=FOLDER on storage that every machine sees at the same path"))
    elif len(cluster.machines) > 1:
        lines.append(Line("disk", "ok", "every machine sees the same run folder"))
    return lines
