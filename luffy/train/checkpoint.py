"""Checkpoints that are complete or absent.

    checkpoints/latest -> step-000050
    checkpoints/step-000050/
        model/                  a Hugging Face folder: AutoModelForCausalLM loads it
        adapter/                LoRA only: the adapters by themselves
        optimizer.safetensors   moments, master weights, random state
        optimizer/              the same of a sharded run, a file from each process (luffy/distributed/state.py)
        state.json              step, sampler, counters, fingerprints
        manifest.json           size and sha256 of every other file

A checkpoint is written aside, every file is flushed to the disk, then the folder is renamed: its name
is the proof that it is whole, its manifest that it still is. Nothing is overwritten, nothing is
unpickled. Reading checks every hash before the first tensor is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from luffy.config import Config
from luffy.distributed.state import read_whole
from luffy.errors import TrainingStopped, UserError
from luffy.files import flush_path
from luffy.report.recorder import METRICS

MANIFEST = "manifest.json"
SHARDS = "optimizer"
WRITING = ".writing-"
DISK_ERRORS = (OSError, SafetensorError)  # a full disk is either, by whoever was writing
_NAME = re.compile(r"step-(\d{6,})")


def cannot_be_written(step: int, folder: Path, error: BaseException) -> TrainingStopped:
    return TrainingStopped(
        f"stopped at step {step}: its checkpoint cannot be written to {folder} ({error}); those before it are whole: "
        f"mend the disk and run the same command again"
    )


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing or is not what was saved."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path

    @property
    def step(self) -> int:
        match = _NAME.fullmatch(self.path.name)
        return int(match[1]) if match else -1

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "state.json").read_text(encoding="utf-8")))

    @property
    def shards(self) -> Path:
        """There only when a sharded run wrote the checkpoint."""
        return self.path / SHARDS

    def tensors(self) -> dict[str, Tensor]:
        return read_whole(self.shards) if self.shards.is_dir() else load_file(self.path / "optimizer.safetensors")

    def verify(self) -> None:
        """Every file of the manifest is there with its size and hash, and no other file is."""
        manifest = _read_manifest(self.path)
        found = file_entries(self.path)
        present = found.keys() - {MANIFEST}
        for name in sorted(manifest.keys() | present):
            if name not in present:
                raise DamagedCheckpoint(f"checkpoint {self.path} lacks its file {name}")
            if name not in manifest:
                raise DamagedCheckpoint(f"checkpoint {self.path} holds {name}, which was not saved with it")
            if found[name] != manifest[name]:
                raise DamagedCheckpoint(f"checkpoint {self.path}: {name} is not what was saved (its hash differs)")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        files = dict(json.loads(text)["files"])
        if text != manifest_text(files):
            raise ValueError("not as it was written")
        return files
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"checkpoint {path}: {MANIFEST} cannot be read ({error})") from None


def manifest_text(files: dict[str, Any]) -> str:
    """The one way to write it: the manifest has no hash of its own, so that any other byte in it is damage."""
    return json.dumps({"files": files}, indent=1)


def file_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def file_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Of all files below a folder, by relative name; hashing lets other threads run, so shards go side by side."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    with ThreadPoolExecutor() as pool:
        entries = pool.map(file_entry, paths)
        return {str(path.relative_to(folder)): entry for path, entry in zip(paths, entries, strict=True)}


class CheckpointStore:
    """The checkpoints of one run: save, rotate, find the newest that is whole."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def __iter__(self) -> Iterator[Checkpoint]:
        """Complete checkpoints, newest first."""
        if not self.folder.is_dir():
            return
        found = [Checkpoint(p) for p in self.folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
        yield from sorted(found, key=lambda c: -c.step)

    def save(
        self, step: int, write_model: Callable[[Path], None], tensors: dict[str, Tensor], state: dict[str, Any]
    ) -> Checkpoint:
        aside = self.begin(step)
        write_model(aside)
        save_file(tensors, aside / "optimizer.safetensors")
        return self.complete(aside, state)

    def begin(self, step: int) -> Path:
        """A folder to write the files of a checkpoint into; ``complete`` gives it its name."""
        target = self.folder / f"step-{step:06d}"
        if target.exists():
            raise UserError(
                f"checkpoint {target} exists and checkpoints are never overwritten; give the run a new name"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        aside = self.folder / f"{WRITING}{target.name}"
        aside.mkdir()
        return aside

    def complete(self, aside: Path, state: dict[str, Any]) -> Checkpoint:
        (aside / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        (aside / MANIFEST).write_text(manifest_text(file_entries(aside)), encoding="utf-8")
        flush_tree(aside)
        target = aside.with_name(aside.name.removeprefix(WRITING))
        aside.rename(target)
        flush_path(self.folder)
        return Checkpoint(target)

    def settle(self, best_step: int | None) -> None:
        """Everything that follows from which checkpoints exist; safe to repeat, so a kill in between mends itself."""
        if self.folder.is_dir():
            self._sweep()
            self._point_latest()
            self.rotate(best_step)

    def _point_latest(self) -> None:
        """``latest`` names the newest checkpoint, for whoever wants the model and not the step."""
        newest = next(iter(self), None)
        if newest is None:
            return
        link = self.folder / f"{WRITING}latest"
        link.symlink_to(newest.path.name)
        link.replace(self.folder / "latest")

    def rotate(self, best_step: int | None) -> None:
        """Keep the newest ``keep`` and the best; a folder leaves its name before it loses its files."""
        for checkpoint in list(self)[self.keep :]:
            if checkpoint.step != best_step:
                doomed = checkpoint.path.with_name(f".deleting-{checkpoint.path.name}")
                checkpoint.path.rename(doomed)
                shutil.rmtree(doomed)

    def newest_whole(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that passes its manifest; a damaged one is named and set aside, so that
        the resumed run can save under its name again."""
        for checkpoint in self:
            try:
                checkpoint.verify()
            except DamagedCheckpoint as error:
                aside = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                checkpoint.path.rename(aside)
                warn(f"{error}; kept as {aside.name}, trying the checkpoint before it")
                continue
            return checkpoint
        return None

    def _sweep(self) -> None:
        """Remove what a killed run left half-written or half-deleted."""
        for leftover in [*self.folder.glob(f"{WRITING}*"), *self.folder.glob(".deleting-*")]:
            if leftover.is_symlink():
                leftover.unlink()
            else:
                shutil.rmtree(leftover)


def flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.chmod(0o644)  # transformers writes its weights 0600
        flush_path(path)
    flush_path(folder)


def find_checkpoint(cfg: Config, store: CheckpointStore, resume: str, warn: Callable[[str], None]) -> Checkpoint | None:
    """What ``--resume auto|never|PATH`` means for this run folder."""
    if resume == "never":
        if (cfg.folder / METRICS).exists():
            raise UserError(f"{cfg.folder} already holds a run; resume it, or choose another name=")
        return None
    if resume == "auto":
        return store.newest_whole(warn)
    path = Path(resume).resolve()
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"--resume {resume}: not a checkpoint folder (no {MANIFEST}); use auto, never or a step-* folder"
        )
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    if path.parent != store.folder.resolve() and checkpoint.step >= (cfg.train.steps or math.inf):
        raise UserError(
            f"--resume {resume}: that run ended at step {checkpoint.step}; raise train.steps to go on from it"
        )
    later = [c.path.name for c in store if c.step > checkpoint.step]
    if later:
        raise UserError(
            f"--resume {resume}: {store.folder} already holds later checkpoints ({', '.join(later)}); "
            f"choose another name= to branch off"
        )
    return checkpoint


def random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
