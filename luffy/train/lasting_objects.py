"""Objects that stay for the whole training are set aside from Python's garbage collector."""

from __future__ import annotations

import gc


class LastingObjects:
    """Modules, the model, compiled kernels: some 400,000 objects with `transformers` loaded. A full collection looks
    through all that are not set aside, for a quarter of a second in which the GPU waits, about once a step."""

    def __init__(self) -> None:
        self._set_aside = False

    def set_aside(self) -> None:
        """What exists when this is called first; after a step, which loads and compiles what it needs. They are still
        freed when nothing refers to them; cycles among them wait until ``close``."""
        if not self._set_aside:
            gc.collect()
            gc.freeze()
            self._set_aside = True

    def close(self) -> None:
        if self._set_aside:
            gc.unfreeze()
