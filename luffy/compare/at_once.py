"""How many trainings run side by side: what memory and cores allow, and the same number for every arm of a rung."""

from __future__ import annotations

from collections.abc import Sequence

from luffy.compare.arms import Arm
from luffy.config import Config, Method, stages_of
from luffy.dry_run.memory_table import estimate_memory
from luffy.dry_run.place import Place, Renting
from luffy.errors import UserError
from luffy.models.machine import available_cores

FREE = 0.9  # of the memory that is free: the rest is for fragments and growth


def at_once(arms: Sequence[Arm]) -> tuple[int, str]:
    """The most trainings that this machine has room for at once, and why so many."""
    trained = list({arm.method: arm for arm in arms}.values())
    if any(arm.cfg.launch != "local" for arm in trained):
        return 1, "a training takes several processes"
    if any(arm.cfg.rollout.engine != "native" for arm in trained):
        return 1, "how much memory another engine takes beside others is not known"
    place = Place.of(trained[0].cfg, Renting())
    try:
        peak = max(peak_bytes(cfg, method, place) for arm in trained for cfg, method in _trainings(arm))
    except UserError as error:
        return 1, f"the memory of a training is not known ({error})"
    room = f"{place.free / 2**30:.1f} GiB free, {peak / 2**30:.1f} GiB a training"
    by_memory = max(int(FREE * place.free / peak), 1)
    if place.on_gpu:
        return by_memory, room
    cores = available_cores()
    threads = max(arm.cfg.train.threads or cores for arm in trained)
    return max(min(by_memory, cores // threads), 1), f"{room}; {cores} cores, {threads} threads a training"


def peak_bytes(cfg: Config, method: Method, place: Place) -> float:
    """Memory of a training by the estimate of the dry run, if all prompts and responses are of full length."""
    return max(estimate_memory(cfg, method, None, place).totals.values())


def _trainings(arm: Arm) -> list[tuple[Config, Method]]:
    stages = stages_of(arm.cfg)
    return [(stage.cfg, stage.method) for stage in stages] or [(arm.cfg, arm.trained_by)]


def evenly(arms: int, most: int) -> int:
    """The largest number at once, up to ``most``, that divides the arms: none of them trains beside fewer."""
    return max(number for number in range(1, min(most, arms) + 1) if arms % number == 0) if arms else 1


def environment(number: int) -> dict[str, str]:
    """Threads of processes of which ``number`` run at once: an equal part of the cores each. A training with
    ``train.threads`` has those."""
    return {"OMP_NUM_THREADS": str(max(available_cores() // number, 1))} if number > 1 else {}
