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
        """Release the lock; remove folders that hold nothing else, so that a refused run leaves none."""
        folder = Path(self.file.name).parent
        if [p.name for p in folder.iterdir()] == [".lock"]:
            Path(self.file.name).unlink()
        for path in self.created:
            if not any(path.iterdir()):
                path.rmdir()
        self.file.close()


def lock_folder(folder: Path, patience_s: float = 0.0) -> FolderLock:
    """Lock a run folder for one training; the lock ends with its process."""
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
    """Whether ``file`` is still the one at ``path``: a lock on a removed file protects nothing."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
