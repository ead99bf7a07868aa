"""How many trainings run side by side: what memory and cores allow, and the same number for every arm of a rung."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from luffy.compare.arms import Arm
from luffy.config import Config, Method, ModelConfig, stages_of
from luffy.dry_run.memory_table import estimate_memory
from luffy.dry_run.place import Place
from luffy.errors import UserError
from luffy.models.machine import available_cores, pick_device
from luffy.models.shared import Base

FREE = 0.9  # of the memory that is free: the rest is for fragments and growth


def base_of(model: ModelConfig) -> Base | None:
    """The weights below a model's adapters, which processes can share; None if it has none, or runs code of its own."""
    if model.lora is None or model.trust_remote_code or sys.platform != "linux":
        return None
    return Base(model.path, model.dtype, pick_device(model.device), four_bits=model.four_bits)


def shared_base(arms: Sequence[Arm]) -> Base | None:
    """The weights that the most arms begin with; None if no two of them begin with the same. A training of several
    processes shards its own."""
    bases = [base_of(_trainings(arm)[0][0].model) for arm in arms if arm.cfg.launch == "local"]
    common = Counter(base for base in bases if base is not None).most_common(1)
    return common[0][0] if common and common[0][1] > 1 else None


def at_once(arms: Sequence[Arm], shared: Base | None = None) -> tuple[int, str]:
    """The most trainings that this machine has room for at once, and why so many. ``shared``: weights that are there
    once."""
    trained = _of_each_method(arms)
    if any(arm.cfg.launch != "local" for arm in trained):
        return 1, "a training takes several processes"
    if any(arm.cfg.rollout.engine != "native" for arm in trained):
        return 1, "how much memory another engine takes beside others is not known"
    place = Place.of(trained[0].cfg)
    try:
        held = _held_bytes(trained, shared, place)
        peak = max(_own_bytes(arm, shared, place) for arm in trained)
    except UserError as error:
        return 1, f"the memory of a training is not known ({error})"
    room = f"{place.free / 2**30:.1f} GiB free, {peak / 2**30:.1f} GiB a training"
    room += f", {held / 2**30:.1f} GiB shared" if held else ""
    by_memory = max(int((FREE * place.free - held) / peak), 1)
    if place.on_gpu:
        return by_memory, room
    cores = available_cores()
    threads = max(arm.cfg.train.threads or cores for arm in trained)
    return max(min(by_memory, cores // threads), 1), f"{room}; {cores} cores, {threads} threads a training"


def evaluations_at_once(arms: Sequence[Arm], shared: Base) -> int:
    """The most evaluations that there is room for beside ``shared`` weights: each loads a whole model, with adapters
    merged. As much memory as a training's is enough for one."""
    trained = _of_each_method(arms)
    place = Place.of(trained[0].cfg)
    try:
        held = _held_bytes(trained, shared, place)
        whole = [(_not_quantized(cfg), method) for arm in trained for cfg, method in _trainings(arm)]
        peak = max(peak_bytes(cfg, method, place) for cfg, method in whole)
    except UserError:
        return 1
    return max(int((FREE * place.free - held) / peak), 1)


def peak_bytes(cfg: Config, method: Method, place: Place) -> float:
    """Memory of a training by the estimate of the dry run, if all prompts and responses are of full length."""
    return max(estimate_memory(cfg, method, None, place).totals.values())


def weight_bytes(cfg: Config, method: Method, place: Place) -> float:
    """The part of it that the weights take."""
    return estimate_memory(cfg, method, None, place).work.weight_bytes


def _own_bytes(arm: Arm, shared: Base | None, place: Place) -> float:
    """Memory of an arm's training without the weights that it shares. A later stage begins with other weights."""
    first, *later = _trainings(arm)
    own = peak_bytes(*first, place) - (weight_bytes(*first, place) if _begins_with(shared, first[0]) else 0.0)
    return max(own, *(peak_bytes(*training, place) for training in later), 1.0)


def _held_bytes(arms: Sequence[Arm], shared: Base | None, place: Place) -> float:
    firsts = (_trainings(arm)[0] for arm in arms)
    return max((weight_bytes(*first, place) for first in firsts if _begins_with(shared, first[0])), default=0.0)


def _begins_with(shared: Base | None, cfg: Config) -> bool:
    return shared is not None and base_of(cfg.model) == shared


def _not_quantized(cfg: Config) -> Config:
    lora = cfg.model.lora
    return cfg if lora is None else replace(cfg, model=replace(cfg.model, lora=replace(lora, quantize=None)))


def _of_each_method(arms: Sequence[Arm]) -> list[Arm]:
    return list({arm.method: arm for arm in arms}.values())


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
