"""`--dry-run`: what a run will do and need, before any weight is loaded.

``first_step`` checks everything and builds the first batch. ``memory_needs`` counts bytes by ``memory_model``, ``disk``
those of checkpoints.
``times`` gives seconds: on GPUs by the cost model (``gpu_cost``, ``cost``), on a CPU by a trial (``probe``). ``place``
is where the run is meant to be made, ``bare_models`` are models without weights, ``trial`` is one update of a small
model of the same class.
"""

from luffy.dry_run.first_step import dry_run
from luffy.dry_run.place import Renting

__all__ = ["Renting", "dry_run"]
