"""Sharded tensors to disk and back through torch's distributed checkpoints (DCP).

Every process writes its own shards as one safetensors file; how the shards fit together stands in the files'
headers as JSON. DCP's usual format keeps that in a pickle, which runs code when it is loaded; here nothing is
ever unpickled. What N processes wrote, any number can read.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, distribute_tensor


def start_saving(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> Future[Any]:
    """Copy the tensors to host memory, then write them in the background; all processes must call this.

    When the result is there on one process, all processes have written and flushed their files. ``group`` is for
    this alone, so that its messages do not mix with those of the training.
    """
    # Adam's step counts have no dimension, and a slice of such a tensor cannot be read back.
    shaped = {name: tensor.reshape(1) if _is_scalar(name) else tensor for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    future: Any = dcp.async_save(shaped, storage_writer=writer, process_group=group)
    return future


def read_tensors(folder: Path, parameters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Tensors that belong to a sharded parameter (``weight/exp_avg``) sharded as it is; each process reads no more
    than it holds, however many processes wrote. Without ``parameters`` every tensor in full, for a run of one
    process."""
    parameters = parameters or {}
    entries: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {}
    for name, entry in entries.items():
        owner = _owner(name, parameters)
        empty = torch.empty(entry.size, dtype=entry.properties.dtype) if owner is None else torch.empty_like(owner)
        tensors[name] = empty.detach()
    alone = not (dist.is_initialized() and parameters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process means to be alone
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    return {name: tensor.reshape(()) if _is_scalar(name) else tensor for name, tensor in tensors.items()}


def shard_whole(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors saved by a run of one process, sharded like the parameters."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        owner = _owner(name, parameters)
        if isinstance(owner, DTensor):
            moved = tensor.to(owner.device)
            out[name] = distribute_tensor(moved, owner.device_mesh, owner.placements, src_data_rank=None)
    return out


def _is_scalar(name: str) -> bool:
    return name.endswith("/step")


def _owner(name: str, parameters: Mapping[str, Tensor]) -> Tensor | None:
    return None if _is_scalar(name) else parameters.get(name.rpartition("/")[0])
