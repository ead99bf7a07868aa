"""One copy of a model's frozen weights that several processes read.

A holder (`luffy.compare.base_holder`) loads a model and shares it in a file of memory without a name. A process that is
started with ``LUFFY_SHARED_BASE`` in its environment takes it from there instead of loading its own. The file has the
model's modules as a pickle. Memory of tensors on a CPU lies behind it and is mapped, so that a page that a process
writes to becomes its own; memory on a GPU is opened by a handle (CUDA IPC) as long as the holder runs. Buffers, which
some models write to, are copied.

A pickle can run code. The variable names a file of our own parent process and a key, with which the file begins.
"""

from __future__ import annotations

import copyreg
import hmac
import io
import logging
import mmap
import os
import pickle
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VARIABLE = "LUFFY_SHARED_BASE"
KEY_BYTES = 32
HEAD = KEY_BYTES + 8  # the key, and the length of what is pickled
ALIGNMENT = 64  # bytes, as torch allocates: products of other alignment may round in another way

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Base:
    """What weights are the same in several processes, as they ask `load_model` for them."""

    path: str
    dtype: str
    device: str
    trust_remote_code: bool = False
    four_bits: bool = False


@dataclass
class MemoryFile:
    """A file of memory that ends with the process that made it, or with the last one that maps it. Linux only."""

    number: int = field(default_factory=lambda: os.memfd_create("luffy-base"))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """For processes that write or read it."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self.number} {self.key.hex()}"}

    @property
    def is_written(self) -> bool:
        return os.pread(self.number, KEY_BYTES, 0) == self.key

    def close(self) -> None:
        os.close(self.number)


class _Writer(pickle.Pickler):
    """Pickles modules, and collects the storages of their tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.storage.TypedStorage):
            return None
        storage = obj._untyped_storage
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number, obj.dtype

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter) and hasattr(obj, "quant_state"):  # torch would make it a plain parameter
            return copyreg.__newobj__, (type(obj),), obj.__getstate__()  # type: ignore[attr-defined]
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(data))
        self._storages = storages

    def persistent_load(self, pid: Any) -> Any:
        number, dtype = pid
        return torch.storage.TypedStorage(wrap_storage=self._storages[number], dtype=dtype, _internal=True)


def share(model: nn.Module, base: Base, environment: Mapping[str, str] = os.environ) -> None:
    """Write a model to the file that the environment names. One on a GPU must then be kept as it is."""
    place, key = _named_in(environment)
    pickled = io.BytesIO()
    writer = _Writer(pickled)
    writer.dump(model)
    if any(storage.is_cuda for storage in writer.storages):
        torch.cuda.synchronize()  # so that nobody has to wait for an event of this process
    handles, sizes, end = [], [], 0
    for storage in writer.storages:
        handles.append(storage._share_cuda_()[:6] if storage.is_cuda and storage.nbytes() else None)
        sizes.append((end, storage.nbytes()))
        end += 0 if handles[-1] else -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    head = pickle.dumps((base, os.getpid(), pickled.getvalue(), handles, sizes))
    start = _start_of_tensors(len(head))
    with open(place, "r+b") as file:
        os.ftruncate(file.fileno(), start + max(end, 1))
        with mmap.mmap(file.fileno(), 0) as memory:
            memory[KEY_BYTES : HEAD + len(head)] = len(head).to_bytes(8, "little") + head
            for storage, handle, (offset, size) in zip(writer.storages, handles, sizes, strict=True):
                if handle is None and size:
                    _bytes_in(memory, start + offset, size).copy_(torch.tensor([], dtype=torch.uint8).set_(storage))
            memory[:KEY_BYTES] = key


def taken(base: Base) -> Any:
    """The model that a holder shares with this process; None if there is none, or another one."""
    if VARIABLE not in os.environ:
        return None
    try:
        return _read(base)
    except Exception as error:  # whatever reading a pickle may raise: the model can still be loaded
        logger.warning("%s is loaded, the shared one cannot be read (%s: %s)", base.path, type(error).__name__, error)
        return None


def _read(base: Base) -> Any:
    place, key = _named_in(os.environ)
    with open(place, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if not hmac.compare_digest(memory[:KEY_BYTES], key):
        raise ValueError("it is not finished, or not ours")
    length = int.from_bytes(memory[KEY_BYTES:HEAD], "little")
    shared, holder, pickled, handles, sizes = pickle.loads(memory[HEAD : HEAD + length])
    if shared != base:
        logger.info("%s is loaded, because the shared weights are others", base.path)
        return None
    if any(handles) and not os.path.exists(f"/proc/{holder}"):
        raise ValueError("the process that held it is gone")
    start, storages = _start_of_tensors(length), []
    for handle, (offset, size) in zip(handles, sizes, strict=True):
        if handle is not None:
            torch.cuda.init()
            storages.append(torch.UntypedStorage._new_shared_cuda(*handle, b"", False))
        else:
            storages.append(_bytes_in(memory, start + offset, size).untyped_storage())
    model = _Reader(pickled, storages).load()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.clone()
    return model


def _named_in(environment: Mapping[str, str]) -> tuple[str, bytes]:
    place, _, key = environment[VARIABLE].rpartition(" ")
    return place, bytes.fromhex(key)


def _start_of_tensors(length: int) -> int:
    return -(-(HEAD + length) // mmap.PAGESIZE) * mmap.PAGESIZE


def _bytes_in(memory: mmap.mmap, offset: int, size: int) -> Tensor:
    """A part of mapped memory, which stays mapped as long as the tensor is there."""
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset) if size else torch.empty(0)
