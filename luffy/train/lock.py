"""One training per run folder."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from luffy.errors import UserError
from luffy.files import try_lock


@dataclass
class FolderLock:
    """Held while a training runs. ``created`` are the folders that were made for it, outermost last."""

    file: IO[str]
    created: list[Path]

    def release(self) -> None:
        """Leave nothing behind where nothing else was written: a run refused for bad input made no folder."""
        folder = Path(self.file.name).parent
        if [p.name for p in folder.iterdir()] == [".lock"]:
            Path(self.file.name).unlink()
        for path in self.created:
            if not any(path.iterdir()):
                path.rmdir()
        self.file.close()


def lock_folder(folder: Path, patience_s: float = 0.0) -> FolderLock:
    """One training per run folder: the lock dies with its process, so a killed run leaves none behind."""
    created = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write the run folder {folder} ({error.strerror}); choose another out=") from None
    deadline = time.monotonic() + patience_s
    while not try_lock(file):
        if time.monotonic() >= deadline:
            file.close()
            raise UserError(f"another training is running in {folder}; wait for it or choose another name=")
        time.sleep(0.2)
    if not _is_still(folder / ".lock", file):
        file.close()
        return lock_folder(folder, patience_s)
    return FolderLock(file, created)


def _is_still(path: Path, file: IO[str]) -> bool:
    """Whether the file is the one of that name: a lock on a file that was removed meanwhile keeps nobody out."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
