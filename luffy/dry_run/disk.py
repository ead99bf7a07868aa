"""The disk space that a run will need for its checkpoints, and how to need less."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

from luffy.config import Config
from luffy.dry_run.memory import Parts, Work, moment_bytes
from luffy.dry_run.place import Place
from luffy.run_folder.checkpoint import files_below

# Settings that write less, the mildest first.
LESS = ({"keep_optimizer": 1}, {"keep_best": False}, {"keep": 1})


def checkpoint_parts(cfg: Config, method: str, work: Work) -> Parts:
    """Bytes of one checkpoint: the model with its adapters merged, and the state that a resume needs."""
    masters = work.itemsize == 2 and (cfg.model.lora is None or cfg.launch != "local")
    averaged = method == "rl" and cfg.teacher.average > 0
    adapters = 0 if cfg.model.lora is None else 4 * work.trained
    return {
        "model": float(work.parameters * work.itemsize + adapters),
        "optimizer state": float(work.trained * (moment_bytes(cfg, method) + 4 * masters + 4 * averaged)),
    }


def checkpoints_at_once(cfg: Config, steps: int) -> tuple[int, int]:
    """The number of checkpoints while one is written, and when the run is done."""
    t, every = cfg.train, cfg.eval.every
    evaluated = t.keep_best and cfg.data.eval is not None and every > 0
    saved = min(steps, math.ceil(steps / t.save_every) + (math.ceil(steps / every) if evaluated else 0))
    kept = min(saved, t.keep + evaluated)
    return min(saved, kept + 1), kept


def bytes_of_run(cfg: Config, steps: int, parts: Parts) -> tuple[float, float]:
    """Bytes while a checkpoint is written, at most, and when the run is done."""
    model, state = parts["model"], parts["optimizer state"]
    writing, kept = checkpoints_at_once(cfg, steps)
    resumable = cfg.train.keep_optimizer or kept
    states = min(writing, min(kept, resumable) + 1), min(kept, resumable)
    return writing * model + states[0] * state, kept * model + states[1] * state


def disk_line(cfg: Config, work: Work, parts: Parts, steps: int, trainings: int, place: Place) -> str:
    """The bytes that ``trainings`` like this one write, one after the other, against the free space of their disk."""
    peak, end = bytes_of_run(cfg, steps, parts)
    for_engine = _pushed_by_folder(cfg, place) * work.parameters * work.itemsize
    before = (trainings - 1) * end + for_engine
    writing, _ = checkpoints_at_once(cfg, steps)
    each = ", ".join(f"{name} {size_of(size)}" for name, size in parts.items())
    there = sum(path.stat().st_size for path in files_below(cfg.folder / "checkpoints"))
    disk = next(path for path in (cfg.folder.absolute(), *cfg.folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(disk).free
    used = f" and {size_of(there)} of this run's checkpoints" if there else ""
    short = ""
    if before + peak > free + there:
        short = f": TOO LITTLE; {_advice(cfg, steps, parts, free + there - before)}"
    several = f" of {trainings} runs" if trainings > 1 else ""
    return (
        f"up to {size_of(before + peak)}{several}, {size_of(before + end)} at the end: {writing} checkpoints at once, "
        f"one being written ({each} each); the disk of {disk} has {size_of(free)} free{used}{short}"
    )


def _pushed_by_folder(cfg: Config, place: Place) -> bool:
    """Whether weights get to vLLM through the run's folder."""
    v = cfg.rollout.vllm
    if cfg.rollout.engine != "vllm" or v.shared_folder is not None:
        return False
    direct = place.on_gpu and (bool(v.servers) or v.tensor_parallel_size == 1)
    return v.transfer == "folder" or (v.transfer == "auto" and not direct)


def _advice(cfg: Config, steps: int, parts: Parts, room: float) -> str:
    """Settings that write less, one after the other until a run fits into ``room`` bytes."""
    said: list[str] = []
    most = bytes_of_run(cfg, steps, parts)[0]
    for changes in LESS:
        cfg = replace(cfg, train=replace(cfg.train, **changes))
        peak = bytes_of_run(cfg, steps, parts)[0]
        if peak < most:
            ((name, value),) = changes.items()
            said.append(f"train.{name}={str(value).lower()} ({size_of(peak)})")
            most = peak
        if peak <= room:
            break
    less = f"to write less, set {', then '.join(said)}; or " if said else ""
    return f"{less}set out= to a larger disk"


def size_of(size: float) -> str:
    """Bytes in words: decimal units, as disks are sold."""
    unit, name = (1e9, "GB") if size >= 1e8 else (1e6, "MB")
    return f"{size / unit:,.1f} {name}"
