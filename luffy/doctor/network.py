"""Connections between machines, and the bandwidth of the collectives that sharded weights use."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from luffy.distributed.world import join_world
from luffy.doctor.findings import Cluster, Facts, Line, judged
from luffy.doctor.machine import gpu_uuid, sharing_ranks
from luffy.doctor.watch import Context
from luffy.models.machine import timed

CONNECT_S = 5.0
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
FIRST_BYTES, MOST_BYTES = 1 << 22, 1 << 28  # of the gathered tensor
WANTED_S = 0.3  # of one collective
REPEATS = 3
SLOW_LINK = 1e9  # bytes a second between GPUs
# torch 2.13 calls them by new names and warns of the old ones.
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---- ports


def measure_ports(context: Context) -> dict[str, Any]:
    """Listen on a free port of each machine and connect to the ports of the others, as NCCL and gloo do."""
    facts: dict[str, Any] = {"unreached": [], "absent": absent_interfaces(), "servers": {}}
    if context.rank == 0:
        rollout, second = context.cfg.rollout, context.cfg.rollout.overrides
        servers = (*rollout.vllm.servers, *(second.servers if second else ()), *context.cfg.teacher.servers)
        facts["servers"] = {url: connection_fault(*_host_and_port(url)) for url in servers}
    if len(context.leaders) > 1 and context.rank in context.leaders:
        facts["unreached"] = _unreached(context)
    return facts


def _unreached(context: Context) -> list[str]:
    """Machines whose port this one cannot connect to, each with the reason."""
    leaders = context.leaders
    with socket.create_server(("", 0)) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        context.board.put(f"port/{context.rank}", [own_address(), server.getsockname()[1]])
        context.watch.meet()
        faults = {}
        for leader in leaders:
            if leader != context.rank:
                address, port = context.board.wait(f"port/{leader}")
                faults[context.hosts[leader]] = connection_fault(address, port)
        context.board.put(f"connected/{context.rank}", True)
        context.watch.meet()
        for leader in leaders:
            context.board.wait(f"connected/{leader}")
    return [f"{host}: {fault}" for host, fault in faults.items() if fault]


def _accept(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # closed: the check is over
            return
        connection.close()


def own_address() -> str:
    """This machine's address on the way to the main rank, which other machines can reach too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 9))))
        return str(probe.getsockname()[0])


def connection_fault(host: str, port: int) -> str:
    """The reason why no connection is made; '' if one is."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"port {port}: {error.strerror or error}"
    return ""


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "//" in url else f"//{url}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def absent_interfaces() -> list[str]:
    """Variables that name a network interface which this machine does not have."""
    here = [name for _, name in socket.if_nameindex()]
    wrong = []
    for variable in INTERFACES:
        wanted = os.environ.get(variable, "")
        names = [name.removeprefix("=") for name in wanted.split(",") if name]
        if names and not wanted.startswith("^") and not any(one.startswith(name) for name in names for one in here):
            wrong.append(f"{variable}={wanted} (there: {', '.join(here)})")
    return wrong


def judge_ports(cluster: Cluster, facts: Facts) -> list[Line]:
    lines = []
    for rank, fact in facts.items():
        for text in fact["absent"]:
            fix = "set it to an interface that this machine has, or unset it"
            lines.append(Line("ports", "failed", f"{text} on {cluster.hosts[rank]}", fix))
        if fact["unreached"]:
            text = f"{cluster.hosts[rank]} cannot connect to {'; '.join(fact['unreached'])}"
            fix = "open all TCP ports between the machines (firewall, security group, network policy)"
            lines.append(Line("ports", "failed", text, fix))
    servers = {url: fault for fact in facts.values() for url, fault in fact["servers"].items()}
    for url, fault in servers.items():
        if fault:
            lines.append(Line("ports", "failed", f"{url}: {fault}", "start the server (luffy serve), or open its port"))
    if lines:
        return list(dict.fromkeys(lines))
    if len(cluster.machines) > 1:
        return [Line("ports", "ok", f"each of {len(cluster.machines)} machines can connect to every other")]
    if servers:
        return [Line("ports", "ok", f"{len(servers)} servers can be reached")]
    return [Line("ports", "skipped", "one machine and no servers: no open port is needed")]


# ---- joining


def measure_connection(context: Context) -> dict[str, Any] | None:
    """Connect the ranks as a training does."""
    if context.cfg.launch == "local":
        return None
    context.watch.meet()
    started = time.perf_counter()
    # The watch names a rank that hangs before the exchange itself gives up.
    context.world = join_world(context.device, 3 * context.limit_s)
    context.watch.meet()
    token = context.world.from_main(secrets.token_hex(4))
    agree = len(set(context.world.gather(token))) == 1
    return {"seconds": time.perf_counter() - started, "backend": dist.get_backend_config(), "agree": agree}


def judge_connection(cluster: Cluster, facts: Facts) -> list[Line]:
    seconds = max(fact["seconds"] for fact in facts.values())
    found = f"{len(facts)} ranks joined in {seconds:.1f} s ({facts[min(facts)]['backend']})"
    differ = not all(fact["agree"] for fact in facts.values())
    return [judged("connection", found, (differ, "failed", ", but do not get the same object", "report it as a bug"))]


# ---- bandwidth


def measure_bandwidth(context: Context) -> dict[str, Any] | None:
    """Bytes per second that each rank sends and receives in a collective that takes a moment."""
    world = context.world
    if world.size < 2:
        return None
    device = world.device or torch.device("cpu")
    on_gpu = device.type == "cuda"
    facts: dict[str, Any] = {"on_gpu": on_gpu, "uuid": gpu_uuid() if on_gpu else None}
    for name, collective in {"all-gather": _all_gather, "reduce-scatter": _reduce_scatter}.items():
        context.watch.meet()
        first = max(world.gather(_seconds(collective, FIRST_BYTES, world.size, world.rank, device)))
        size = int(min(max(FIRST_BYTES * WANTED_S / first, FIRST_BYTES), MOST_BYTES))
        context.watch.meet()
        seconds = max(world.gather(_seconds(collective, size, world.size, world.rank, device)))
        facts[name] = {"bytes": size, "seconds": seconds, "rate": size * (world.size - 1) / world.size / seconds}
    return facts


def _seconds(collective: Any, size: int, ranks: int, rank: int, device: torch.device) -> float:
    act, found, expected = collective(max(size // 4 // ranks, 1), ranks, rank, device)
    act()
    wrong = int((found != expected).sum())
    if wrong:
        raise RuntimeError(f"{act.__name__} returned {wrong} of {found.numel()} wrong values")
    return min(timed(act, device) for _ in range(REPEATS))


Collective = tuple[Callable[[], Any], torch.Tensor, torch.Tensor]  # the work, its result, the right result


def _all_gather(part: int, ranks: int, rank: int, device: torch.device) -> Collective:
    mine = torch.full((part,), float(rank), device=device)
    every = torch.full((part * ranks,), -1.0, device=device)

    def all_gather() -> None:
        GATHER(every, mine)

    return all_gather, every, torch.arange(ranks, device=device, dtype=every.dtype).repeat_interleave(part)


def _reduce_scatter(part: int, ranks: int, rank: int, device: torch.device) -> Collective:
    every = torch.full((part * ranks,), float(rank + 1), device=device)
    mine = torch.full((part,), -1.0, device=device)

    def reduce_scatter() -> None:
        SCATTER(mine, every)

    return reduce_scatter, mine, torch.full_like(mine, ranks * (ranks + 1) / 2)


def judge_bandwidth(cluster: Cluster, facts: Facts) -> list[Line]:
    """Warn of a slow link between GPUs."""
    fact, sharing = facts[min(facts)], sharing_ranks(facts)
    fix = "set NCCL_DEBUG=INFO and look for NET/Socket: NCCL should use NVLink, PCIe or InfiniBand"
    lines = []
    for name in ("all-gather", "reduce-scatter"):
        rate, size = fact[name]["rate"], fact[name]["bytes"]
        found = f"{rate / 1e9:.3g} GB/s a rank ({size / 2**20:.0f} MiB, {len(cluster.hosts)} ranks)"
        found += "; ranks share a GPU, so this is the speed of sockets" if sharing else ""
        slow = fact["on_gpu"] and rate < SLOW_LINK and not sharing
        lines.append(judged(name, found, (slow, "warning", "", fix)))
    return lines
