"""`--dry-run`: what a run will do and need, before any weight is loaded.

``check`` validates the run, builds the first batch (``first_step``, ``work``) and writes ``lines``. ``memory`` counts
bytes, ``times`` seconds (on GPUs by the model in ``cost``). ``place`` is the hardware
that the run is meant for, ``models`` are models without weights. ``memory_table`` is `luffy memory`.
"""

from luffy.dry_run.check import dry_run
from luffy.dry_run.place import Renting

__all__ = ["Renting", "dry_run"]
