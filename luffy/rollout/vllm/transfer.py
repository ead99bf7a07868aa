"""How weights get to engines in other processes.

A folder works everywhere that servers see the trainer's disk. NCCL is vLLM's own transfer between GPUs: its routes
``init_weight_transfer_engine``, ``start_weight_update``, ``update_weights`` and ``finish_weight_update`` prepare the
workers, and the tensors are broadcast one by one in the order announced, which is the same on every version of vLLM
that has the routes.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from luffy.errors import UserError
from luffy.files import try_lock
from luffy.rollout.policy_weights import adapter_tensors, checkpoint_weights, tensors_of
from luffy.rollout.vllm.http_client import Server, ServerLost, ServerTimeout

SHARD_BYTES = 2 << 30


class Transfer(Protocol):
    def push(self, model: nn.Module, version: int, servers: Sequence[Server]) -> list[Server]:
        """Give all of the policy's weights to the servers; returns those that were lost meanwhile. The others have
        them."""


@contextmanager
def write_weights(model: nn.Module, parent: Path, version: int, merged: bool = True) -> Iterator[Path]:
    """Write the policy's weights as safetensors in a folder that exists as long as the block runs; without ``merged``
    adapters are left out."""
    with _push_folder(parent, version) as folder:
        for number, shard in enumerate(_shards(tensors_of(model, merged))):
            save_file(shard, folder / f"part-{number:05d}.safetensors")
        yield folder


@contextmanager
def write_adapters(model: nn.Module, parent: Path, version: int) -> Iterator[Path]:
    """Write the policy's adapters as PEFT would, in a folder that exists as long as the block runs. Its name is new in
    every push: it becomes the adapter's name in vLLM, which remembers keys and values by it."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in adapter_tensors(model).items()}
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    with _push_folder(parent, version) as folder:
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")
        yield folder


@contextmanager
def _push_folder(parent: Path, version: int) -> Iterator[Path]:
    """A folder that exists as long as the block runs. Each user of each machine has a subfolder of ``parent`` with a
    lock that writers share; a writer that gets it alone removes the leftovers of killed ones."""
    own = parent / f"{socket.gethostname()}-{os.getuid()}"
    own.mkdir(parents=True, exist_ok=True)
    with (own / ".lock").open("a+") as lock:  # readable: NFS asks for it where a lock is shared
        if try_lock(lock):
            for leftover in own.glob("weights-*"):
                shutil.rmtree(leftover)
        fcntl.flock(lock, fcntl.LOCK_SH)
        folder = own / f"weights-{version:06d}-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """A few at a time, so that a large model is never twice in the host's memory."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous().cpu()
        size += tensor.nbytes
    yield shard


def on_all_servers(servers: Sequence[Server], call: Callable[[Server], Any]) -> list[Server]:
    """Call every server at the same time; returns those that were lost."""
    with ThreadPoolExecutor(max(len(servers), 1)) as pool:
        answers = [(server, pool.submit(call, server)) for server in servers]
    return [server for server, answer in answers if _is_lost(answer)]


def _is_lost(answer: Future[Any]) -> bool:
    try:
        answer.result()
    except ServerLost:
        return True
    return False


class FolderTransfer:
    """Write once, and every server reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def push(self, model: nn.Module, version: int, servers: Sequence[Server]) -> list[Server]:
        with write_weights(model, self.folder, version) as folder:
            return on_all_servers(servers, lambda server: server.rpc("luffy_load", version=version, folder=str(folder)))


class AdapterTransfer:
    """The weights below the adapters once to every server, then adapters alone; all through a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._base = secrets.token_hex(8)  # tells a server's weights from those of another run, or of its start

    def push(self, model: nn.Module, version: int, servers: Sequence[Server]) -> list[Server]:
        lost = self._push_base(model, version, servers)
        reached = [server for server in servers if server not in lost]
        with write_adapters(model, self.folder, version) as folder:
            return lost + on_all_servers(reached, lambda server: _load_adapter(server, folder, version))

    def _push_base(self, model: nn.Module, version: int, servers: Sequence[Server]) -> list[Server]:
        without: list[Server] = []

        def look(server: Server) -> None:
            state = server.rpc("luffy_state")
            if not state.get("takes_adapters"):  # an older luffy says nothing of them
                raise UserError(
                    f"{server.url} was started without adapters; start it with the same model.lora and "
                    "rollout.vllm.adapters=alone"
                )
            if state["base"] != self._base:
                without.append(server)

        lost = on_all_servers(servers, look)
        if not without:
            return lost
        with write_weights(model, self.folder, version, merged=False) as folder:
            given = {"version": -1, "folder": str(folder), "base": self._base}
            return lost + on_all_servers(without, lambda server: server.rpc("luffy_load", **given))


def _load_adapter(server: Server, folder: Path, version: int) -> None:
    """Load the adapters of a version; those of the version before are unloaded once the new ones are there."""
    try:
        server.post("v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})
    except ServerLost as error:
        if not isinstance(error, ServerTimeout):
            server.check_health()
            raise UserError(f"vLLM refused the adapter: {error}; set rollout.vllm.adapters=merged") from None
        raise
    server.rpc("luffy_note_version", version=version)
    before, server.adapter = server.adapter, folder.name
    if before is not None:
        with suppress(UserError):  # restarted meanwhile
            server.post("v1/unload_lora_adapter", {"lora_name": before})


class NcclTransfer:
    """One group of the trainer (rank 0) and every worker of every server; made anew when the servers change."""

    def __init__(self, host: str, join: Callable[[str, int, int], Any] | None = None) -> None:
        self.host = host
        self._join = join or group_joiner()
        self._servers: tuple[Server, ...] = ()
        self._group: Any = None

    def push(self, model: nn.Module, version: int, servers: Sequence[Server]) -> list[Server]:
        """A server that is lost in the middle leaves the broadcast without an end, so all are asked first. The group
        is thrown away whenever one did not answer, and the others get the weights in one of their own."""
        lost = on_all_servers(servers, lambda server: server.check_health())
        while alive := [server for server in servers if server not in lost]:
            opening = [] if tuple(alive) == self._servers else self._open(alive)
            missing = opening or self._send(model, version, alive)
            if not missing:
                break
            self._servers, self._group = (), None
            lost += missing
        if lost:
            self._servers, self._group = (), None
        return lost

    def _open(self, servers: Sequence[Server]) -> list[Server]:
        """The workers wait for the trainer inside their call, so both sides come at the same time."""
        sizes: dict[Server, int] = {}
        lost = on_all_servers(servers, lambda s: sizes.update({s: int(s.get("get_world_size")["world_size"])}))
        if lost:
            return lost
        world, port, rank = 1 + sum(sizes.values()), free_port(self.host), 1
        shared = {"master_address": self.host, "master_port": port, "world_size": world}
        with ThreadPoolExecutor(len(servers)) as pool:
            waiting = []
            for server in servers:
                info = {"init_info": {**shared, "rank_offset": rank}}
                waiting.append((server, pool.submit(server.post, "init_weight_transfer_engine", info)))
                rank += sizes[server]
            self._group = self._join(self.host, port, world)
        self._servers = tuple(servers)
        return [server for server, answer in waiting if _is_lost(answer)]

    def _send(self, model: nn.Module, version: int, servers: Sequence[Server]) -> list[Server]:
        """Adapters are merged one layer at a time, when its turn comes: never is the whole model there twice."""
        weights = checkpoint_weights(model)
        info = {
            "names": [weight.name for weight in weights],
            "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights],
            "shapes": [list(weight.shape) for weight in weights],
        }
        lost = on_all_servers(servers, lambda server: server.post("start_weight_update", {}))
        if lost:
            return lost
        with ThreadPoolExecutor(len(servers)) as pool:
            receiving = [
                (server, pool.submit(server.post, "update_weights", {"update_info": info})) for server in servers
            ]
            for weight in weights:
                self._group.broadcast(weight.tensor().contiguous(), src=0)
        lost = [server for server, answer in receiving if _is_lost(answer)]
        return lost or on_all_servers(servers, lambda server: _finish(server, version))


def _finish(server: Server, version: int) -> None:
    server.post("finish_weight_update", {})
    server.rpc("luffy_note_version", version=version)


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def group_joiner() -> Callable[[str, int, int], Any]:
    """Makes the trainer's end of the group; the one thing for which a remote engine needs vLLM here too. It is imported
    before any server waits for the trainer."""
    try:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
    except ImportError:
        raise UserError(
            "rollout.vllm.transfer=nccl needs vLLM installed with the trainer too; install it, or set "
            "rollout.vllm.transfer=folder"
        ) from None

    def join(host: str, port: int, world: int) -> Any:
        group = StatelessProcessGroup.create(host=host, port=port, rank=0, world_size=world)
        device = torch.device("cuda", torch.cuda.current_device())
        return TensorsOnDevice(PyNcclCommunicator(group, device=device), device)

    return join


class TensorsOnDevice:
    """A communicator that takes tensors from wherever they are: the copy of a rollout group waits in host memory."""

    def __init__(self, communicator: Any, device: torch.device) -> None:
        self._communicator, self._device = communicator, device

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self._communicator.broadcast(tensor.to(self._device), src=src)
