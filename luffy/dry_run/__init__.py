"""`--dry-run`: what a run will do and need, and what its base can do.

``check`` validates the run, builds the first batch (``first_step``, ``work``) and writes ``lines``. ``memory`` counts
bytes, ``times`` seconds (on GPUs by the model in ``cost``). ``place`` is the hardware that the run is meant for,
``models`` are models without weights. ``base_model`` loads them and measures what decides on methods
(``base_lines``). ``memory_table`` is `luffy memory`.
"""

from luffy.dry_run.check import dry_run

__all__ = ["dry_run"]
