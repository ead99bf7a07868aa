"""A race in FSDP2, without luffy: wrong gradients after `torch.autograd.grad` with respect to what the root returned.

    python benchmarks/fsdp_race.py                 # 2 and 4 ranks on one GPU, every variant

`autograd.grad` makes FSDP2's pre-backward hook fire: the last layer's gather starts ahead, and nobody waits for its
result. `finalize_backward` drops its buffer after the current stream waited for the gather; the stream that copies
the next gather's input did not. In the real backward pass the root's gather gets that buffer, copies its input in,
and the first gather, still running, writes another rank's slice of the layer over it.

Variants: `plain`; `slow` holds every gather up by 10 ms, so that the race is lost every time; `waited` makes the
copy-in stream wait where torch drops the buffer; `copied` differentiates with respect to a copy (luffy's remedy).
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

WIDTH, CYCLES = 256, 20_000_000
VARIANTS = ("plain", "slow", "slow waited", "slow copied", "copied")


class Net(nn.Module):
    """The root has a head that is smaller than a layer, so the slices of their gathers overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def build() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().cuda(), torch.randn(8, WIDTH).cuda()


def gather_late(self: DefaultAllGather, *args, gather=DefaultAllGather.__call__, **kwargs):
    torch.cuda._sleep(CYCLES)
    return gather(self, *args, **kwargs)


def finalize_waiting(self: FSDPParamGroup, finalize=FSDPParamGroup.finalize_backward) -> None:
    """As torch does, after the stream that copies in has waited for a gather that nobody used."""
    if self._all_gather_result is not None and self._all_gather_result.all_gather_event is not None:
        self.comm_ctx.all_gather_copy_in_stream.wait_event(self._all_gather_result.all_gather_event)
    finalize(self)


def error(variant: str) -> float:
    """||gradients - those of one process|| / ||those||, over all layers; all ranks have the same input."""
    plain, x = build()
    plain(x).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in plain.layers.parameters()])
    net, x = build()
    for module in (*net.layers, net):
        fully_shard(module)
    late = patch.object(DefaultAllGather, "__call__", gather_late) if "slow" in variant else nullcontext()
    waits = (
        patch.object(FSDPParamGroup, "finalize_backward", finalize_waiting) if "waited" in variant else nullcontext()
    )
    with late, waits:
        out = net(x)
        out = out.clone() if "copied" in variant else out
        loss = out.square().sum()
        torch.autograd.grad(loss, out, retain_graph=True)
        loss.backward()
    found = torch.cat([p.grad.full_tensor().flatten() for p in net.layers.parameters()])
    return float((found - expected).norm() / expected.norm())


def work(rank: int, ranks: int, folder: str) -> None:
    os.environ["NCCL_HOSTID"] = f"host{rank}"  # NCCL refuses two ranks of one machine on one GPU
    torch.cuda.set_device(0)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    for variant in VARIANTS:
        errors = torch.zeros(ranks, device="cuda")
        errors[rank] = error(variant)
        dist.all_reduce(errors)
        if rank == 0:
            print(f"{ranks} ranks, {variant:12} relative error of the gradients {errors.max():.2e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for ranks in map(int, sys.argv[1:] or ("2", "4")):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (ranks, folder), nprocs=ranks)
