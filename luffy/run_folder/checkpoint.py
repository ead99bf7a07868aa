"""Checkpoints that are complete or absent.

    checkpoints/latest -> step-000050
    checkpoints/step-000050/
        model/                  a Hugging Face folder: AutoModelForCausalLM loads it; README.md is its model card
        adapter/                LoRA only: the adapters by themselves
        optimizer.safetensors   moments, master weights, what the method remembers
        optimizer/              the same of a sharded run, a file from each process (luffy/distributed/state.py)
                                neither in checkpoints older than the newest ``train.keep_optimizer``
        state.json              step, sampler, counters, fingerprints
        manifest.json           size and sha256 of every other file, less the model card

A checkpoint is written aside, every file is flushed to the disk, then the folder is renamed: its name
is the proof that it is whole, its manifest that it still is. Nothing is overwritten (except the manifest, when
optimizer state is removed), nothing is unpickled. Reading checks every hash before the first tensor is used. Files that
were not saved with a checkpoint (``.DS_Store``, leftovers of a copy) are named and not read. A model card is text that
anybody may change or remove: it is never damage.

``saved.json`` beside ``checkpoints/`` has the step of the newest checkpoint: a run folder whose checkpoints are lost
is told from one that had none yet.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from luffy.config import Config
from luffy.distributed.state import read_tensors
from luffy.errors import TrainingStopped, UserError
from luffy.files import flush_path, json_object, write_atomically
from luffy.run_folder.layout import BEST, CARD, CURVES, METRICS, SAVED
from luffy.run_folder.runs import checkpoint_step
from luffy.run_folder.saved_state import read_safetensors, read_state

MANIFEST = "manifest.json"
SHARDS = "optimizer"
OPTIMIZER = "optimizer.safetensors"
WRITING = ".writing-"
LATEST = "latest"
DISK_ERRORS = (OSError, SafetensorError)  # a full disk raises either, depending on the writer
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
        step = checkpoint_step(self.path)
        return -1 if step is None else step

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def run_folder(self) -> Path | None:
        """Folder of the run that made it; None if the checkpoint was copied elsewhere."""
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else None

    def state(self) -> dict[str, Any]:
        return read_state(self.path / "state.json", self.step if self.step >= 0 else None)

    @property
    def shards(self) -> Path:
        """Folder of the optimizer's shards; only a sharded run writes one."""
        return self.path / SHARDS

    def tensors(self) -> dict[str, Tensor]:
        if self.shards.is_dir():
            return read_tensors(self.shards)
        return read_safetensors(self.path / OPTIMIZER)

    def check(self, warn: Callable[[str], None]) -> None:
        """Raise a DamagedCheckpoint unless a run can resume from it; ``warn`` about files that are not read."""
        if foreign := self.verify():
            warn(f"checkpoint {self.path}: ignored {', '.join(foreign)}, not saved with it")
        self.check_resumable()

    def check_resumable(self) -> None:
        """Raise a DamagedCheckpoint if the manifest lists no optimizer state."""
        if not any(is_optimizer(name) for name in _read_manifest(self.path)):
            raise DamagedCheckpoint(
                f"checkpoint {self.path} has no optimizer state (train.keep_optimizer removes it), so no run resumes "
                f"from it; start a new run with model.path={self.model}"
            )

    def remove_optimizer(self) -> None:
        """Remove the optimizer state; safe to repeat after a kill. The manifest changes first: files that it does not
        list are not read."""
        manifest = _read_manifest(self.path)
        kept = {name: entry for name, entry in manifest.items() if not is_optimizer(name)}
        if kept != manifest:
            write_atomically(self.path / MANIFEST, manifest_text(kept))
        (self.path / OPTIMIZER).unlink(missing_ok=True)
        if self.shards.is_dir():
            remove_tree(self.shards)

    def verify(self) -> list[str]:
        """Check that every file of the manifest is there with its size and hash; returns the names of other files.

        A foreign file where a loader would read it is damage too.
        """
        manifest = {name: entry for name, entry in _read_manifest(self.path).items() if not is_card(name)}
        present = {str(p.relative_to(self.path)): p for p in files_below(self.path)}
        for name in manifest:
            if name not in present:
                raise DamagedCheckpoint(f"checkpoint {self.path} lacks its file {name}")
        found = file_entries(self.path, [present[name] for name in manifest])
        for name, entry in found.items():
            if entry != manifest[name]:
                raise DamagedCheckpoint(f"checkpoint {self.path}: {name} is not what was saved (its hash differs)")
        foreign = sorted(n for n in present.keys() - manifest.keys() - {MANIFEST} if not is_card(n))
        unread = not any(map(is_optimizer, manifest))  # a kill while the optimizer state was removed leaves some of it
        for name in foreign:
            if _is_loaded(Path(name)) and not (unread and is_optimizer(name)):
                raise DamagedCheckpoint(
                    f"checkpoint {self.path} holds {name}, which was not saved with it and would be loaded; remove it"
                )
        return foreign


def is_card(name: str) -> bool:
    """Whether a file of a checkpoint, by its relative name, is a model card or the figure of one."""
    return name in {f"{folder}/{file}" for folder in ("model", "adapter") for file in (CARD, CURVES)}


def is_optimizer(name: str) -> bool:
    """Whether a file of a checkpoint, by its relative name, holds optimizer state."""
    return name == OPTIMIZER or Path(name).parts[0] == SHARDS


def _is_loaded(name: Path) -> bool:
    """Whether transformers, peft or the reader of shards would pick up a file of this name."""
    if name.parts[0] == SHARDS:
        return name.suffix == ".safetensors"
    return len(name.parts) > 1 and name.suffix in (".json", ".safetensors") and not name.name.startswith(".")


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
    """The manifest as text. It has no hash itself: a file that is not exactly this text is damaged."""
    return json.dumps({"files": files}, indent=1)


def file_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def files_below(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file()]


def file_entries(folder: Path, paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Size and hash of files below a folder, by relative name; threads read them in parallel."""
    with ThreadPoolExecutor() as pool:
        entries = pool.map(file_entry, paths)
        return {str(path.relative_to(folder)): entry for path, entry in zip(paths, entries, strict=True)}


def remove_tree(path: Path) -> None:
    """Remove a folder with its content; a link to one is removed alone."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _delete(path: Path) -> None:
    """Remove a checkpoint; it loses its name before its files, so that a kill leaves no half of one."""
    remove_tree(path.rename(path.with_name(f".deleting-{path.name}")))


def _unhashed(folder: Path) -> dict[str, bytes]:
    """The manifest and the files that have no hash in it: two valid checkpoints with equal ones are the same."""
    names = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    return {name: path.read_bytes() for name, path in names.items() if name == MANIFEST or is_card(name)}


def _only_model(checkpoint: Checkpoint) -> None:
    """Remove the optimizer state of a checkpoint, unless it is on another disk."""
    if not checkpoint.path.is_symlink():
        with suppress(DamagedCheckpoint):  # named when a resume reads it; no reason to end a training
            checkpoint.remove_optimizer()


class CheckpointStore:
    """The checkpoints of one run: save, rotate, find the newest that is whole."""

    def __init__(
        self, folder: Path, keep: int, keep_optimizer: int | None = None, handed_on: frozenset[int] = frozenset()
    ) -> None:
        """``keep`` checkpoints besides the best one; the newest ``keep_optimizer`` of them (None: all) keep optimizer
        state. Steps that stages ``handed_on`` stay too, as models alone."""
        self.folder, self.keep, self.keep_optimizer, self.handed_on = folder, keep, keep_optimizer, handed_on

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
        save_file(tensors, aside / OPTIMIZER)
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
        own = [p for p in files_below(aside) if not p.name.startswith(".")]  # the system's, and soon gone
        own = [p for p in own if not is_card(p.relative_to(aside).as_posix())]
        (aside / MANIFEST).write_text(manifest_text(file_entries(aside, own)), encoding="utf-8")
        flush_tree(aside)
        target = aside.with_name(aside.name.removeprefix(WRITING))
        aside.rename(target)
        flush_path(self.folder)
        return Checkpoint(target)

    def tidy(self, best_step: int | None) -> None:
        """Update ``latest``, remove old checkpoints and what a kill left; safe to repeat after a kill."""
        if self.folder.is_dir():
            self._sweep()
            self._point_latest()
            self.rotate(best_step)
            for checkpoint in [] if self.keep_optimizer is None else list(self)[self.keep_optimizer :]:
                _only_model(checkpoint)

    def _point_latest(self) -> None:
        """Link ``latest`` to the newest checkpoint and write its step to ``saved.json``."""
        newest = next(iter(self), None)
        if newest is None:
            return
        write_atomically(self.folder.parent / SAVED, json.dumps({"step": newest.step}))
        link = self.folder / f"{WRITING}{LATEST}"
        link.symlink_to(newest.path.name)
        if self.copied_latest() is not None:
            names = (self.folder / f"copied-{LATEST}-{number}" for number in itertools.count(1))
            (self.folder / LATEST).rename(next(path for path in names if not path.exists()))
        link.replace(self.folder / LATEST)

    def copied_latest(self) -> Checkpoint | None:
        """``latest`` if it is a folder: copies that follow links (``cp -rL``, S3, zip) make it one."""
        path = self.folder / LATEST
        return Checkpoint(path) if path.is_dir() and not path.is_symlink() else None

    def take_in_copy(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Use a ``latest`` that is a folder, and return the checkpoint that it is a copy of. The copy replaces that
        checkpoint if it is missing or damaged, else the copy is removed. A copy that is damaged or has other files is
        not used; ``tidy`` renames it."""
        copy = self.copied_latest()
        if copy is None:
            return None
        try:
            foreign = copy.verify()
        except DamagedCheckpoint as error:
            warn(f"{error}; it is a copy and not used")
            return None
        own = Checkpoint(self.folder / f"step-{copy.step:06d}")
        if copy.step < 0:
            return None
        if own.path.exists():
            try:
                own.verify()
            except DamagedCheckpoint as error:
                warn(f"{error}; kept as {self.set_aside(own).name}")
        if not own.path.exists():
            copy.path.rename(own.path)
            warn(f"{copy.path} is a folder, not a link: taken as {own.path.name}")
            return own
        if foreign or _unhashed(copy.path) != _unhashed(own.path):
            return None
        _delete(copy.path)
        return own

    def rotate(self, best_step: int | None) -> None:
        """Keep the newest ``keep``, the best, and what stages handed on."""
        for checkpoint in list(self)[self.keep :]:
            if checkpoint.step in self.handed_on:
                _only_model(checkpoint)
            elif checkpoint.step != best_step:
                _delete(checkpoint.path)

    def newest_whole(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that passes its manifest and has optimizer state, None if there is no checkpoint.
        Damaged ones that are newer are named and set aside, so that the resumed run can save under their names;
        DamagedCheckpoint if all are."""
        damaged: list[tuple[Checkpoint, DamagedCheckpoint]] = []
        for checkpoint in self:
            try:
                checkpoint.check(warn)
            except DamagedCheckpoint as error:
                damaged.append((checkpoint, error))
                continue
            for newer, reason in damaged:
                warn(f"{reason}; kept as {self.set_aside(newer).name}, trying the checkpoint before it")
            return checkpoint
        if damaged:
            raise DamagedCheckpoint("; ".join(str(error) for _, error in damaged))
        return None

    def set_aside(self, checkpoint: Checkpoint) -> Path:
        """Give a damaged checkpoint another name, which is returned."""
        aside = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
        if aside.exists() or aside.is_symlink():
            remove_tree(aside)
        return checkpoint.path.rename(aside)

    def _sweep(self) -> None:
        """Remove what a killed run left half-written or half-deleted."""
        for leftover in [*self.folder.glob(f"{WRITING}*"), *self.folder.glob(".deleting-*")]:
            remove_tree(leftover)


def flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.chmod(0o644)  # transformers writes its weights 0600
        flush_path(path)
    flush_path(folder)


def checkpoints_of(run: Path) -> dict[int, Checkpoint]:
    """The checkpoints of a run folder, at least one, by step."""
    found = {checkpoint.step: checkpoint for checkpoint in CheckpointStore(run / "checkpoints", keep=1)}
    if not found:
        raise UserError(f"{run} has no checkpoint yet; train it first")
    return found


def best_or_newest(run: Path) -> tuple[Checkpoint, str]:
    """The checkpoint of a run folder to use, the best by held-out accuracy or else the newest, and which of the two it
    is."""
    found = checkpoints_of(run)
    record = run / BEST
    if record.is_file():
        best = json_object(record.read_bytes(), record, "remove it, and the newest checkpoint is taken", step=int)
        if best["step"] in found:
            return found[best["step"]], "best by held-out accuracy"
    return found[max(found)], "newest"


def model_of(path: str) -> tuple[str, str | None]:
    """The model folder that ``path`` names: a model, a checkpoint or a run folder. For a run folder also which
    checkpoint it is, in words; otherwise None."""
    folder = Path(path)
    if (folder / "config.json").exists():
        return path, None
    if (folder / MANIFEST).is_file():
        return str(folder / "model"), None
    if not (folder / "checkpoints").is_dir():
        return path, None
    checkpoint, which = best_or_newest(folder)
    return str(checkpoint.model), f"step {checkpoint.step}, {which}"


def find_checkpoint(cfg: Config, store: CheckpointStore, resume: str, warn: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that ``--resume auto|never|PATH`` selects for this run folder; None: begin at step 1.

    Records of lost or damaged checkpoints are never overwritten: ``--resume never`` renames them
    (``set_records_aside``).
    """
    _check_links(store)
    if resume == "never":
        _begin_again(cfg, store)
        return None
    copy = store.copied_latest()
    named_copy = copy is not None and Path(resume).resolve() == copy.path.resolve()
    taken_in = store.take_in_copy(warn)
    if resume != "auto":
        return _named_checkpoint(cfg, store, str(taken_in.path) if taken_in and named_copy else resume, warn)
    otherwise = "or begin again with --resume never, which keeps the old records under other names"
    try:
        found = store.newest_whole(warn)
    except DamagedCheckpoint as error:
        raise UserError(f"no checkpoint of {cfg.folder} can be resumed: {error}; mend that, {otherwise}") from None
    saved = _saved_step(cfg)
    if found is None and saved and (cfg.folder / METRICS).exists():
        raise UserError(
            f"{cfg.folder} has the records of a training but not its checkpoints: the newest was of step {saved}, and "
            f"{store.folder} has none; bring them back (is their disk mounted?), {otherwise}"
        )
    return found


def _check_links(store: CheckpointStore) -> None:
    """Raise a UserError if a link leads to a disk that is not mounted: neither begin again nor save there."""
    steps = store.folder.iterdir() if store.folder.is_dir() else ()
    for path in (store.folder, *sorted(p for p in steps if _NAME.fullmatch(p.name))):
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"{path} is a link to {path.readlink()}, which is not there; mount its disk or remove the link"
            )


def _begin_again(cfg: Config, store: CheckpointStore) -> None:
    """Make room for a training from step 1, unless there is one to resume."""
    try:
        found = store.newest_whole(lambda message: None)
    except DamagedCheckpoint:
        for checkpoint in store:
            store.set_aside(checkpoint)
        return
    if found is not None:
        raise UserError(f"{cfg.folder} already holds a run; resume it (--resume auto), or choose another name=")


def _named_checkpoint(cfg: Config, store: CheckpointStore, resume: str, warn: Callable[[str], None]) -> Checkpoint:
    path = Path(resume).resolve()
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"--resume {resume}: not a checkpoint folder (no {MANIFEST}); use auto, never or a step-* folder"
        )
    own = next((c for c in store if c.path.resolve() == path), None)  # it may be a link to another disk
    checkpoint = own or Checkpoint(path)
    checkpoint.check(warn)
    if own is None and path.parent != store.folder.resolve():
        _check_branch(cfg, store, resume, checkpoint.step)
    elif later := [c.path.name for c in store if c.step > checkpoint.step]:
        raise UserError(
            f"--resume {resume}: {store.folder} already holds later checkpoints ({', '.join(later)}); "
            f"choose another name= to branch off"
        )
    return checkpoint


def _check_branch(cfg: Config, store: CheckpointStore, resume: str, step: int) -> None:
    """Check that a run that resumes another run's checkpoint has steps left, and no checkpoints of its own."""
    if step >= (cfg.train.steps or math.inf):
        raise UserError(f"--resume {resume}: that run ended at step {step}; raise train.steps to go on from it")
    if there := [c.path.name for c in store]:
        raise UserError(
            f"--resume {resume}: {store.folder} already holds checkpoints of its own ({', '.join(there)}); go on from "
            f"them with --resume auto, or choose another name= to branch off"
        )
    if _saved_step(cfg) and (cfg.folder / METRICS).exists():
        raise UserError(
            f"--resume {resume}: {cfg.folder} has records of its own, up to a checkpoint of step {_saved_step(cfg)}; "
            f"choose another name= to branch off"
        )


def _saved_step(cfg: Config) -> int:
    """Step of the newest checkpoint that was ever saved here, 0 if there was none."""
    try:
        return int(json.loads((cfg.folder / SAVED).read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError):
        return 1  # a damaged file was written all the same
