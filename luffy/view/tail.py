"""Following a file that is being written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from luffy.files import complete_lines


class Tail:
    """The complete lines added to a file since the last look; all of them again when the file was replaced, as a
    resumed run does."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        self._file: int | None = None

    def was_replaced(self) -> bool:
        """Starts over if so."""
        stat = self.path.stat() if self.path.exists() else None
        current = stat.st_ino if stat else None
        replaced = current != self._file or (stat is not None and stat.st_size < self.position)
        if replaced:
            self._file, self.position = current, 0
        return replaced

    def lines(self) -> Iterator[tuple[int, bytes]]:
        for offset, line in complete_lines(self.path, self.position):
            self.position = offset + len(line)
            yield offset, line
