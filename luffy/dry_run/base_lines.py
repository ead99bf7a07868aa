"""What `--dry-run` says of the base: what was measured, and which methods docs/choose.md names for it."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.dry_run.base_model import NEVER, PAGE, PROBLEMS, RARE, SECONDS, TRIES, Found, measure
from luffy.dry_run.place import Place
from luffy.errors import UserError
from luffy.models.load import DTYPES, model_folder, slow_dtype
from luffy.rewards.verifier import why_nothing_was_scored
from luffy.step.tasks import TaskSet

LARGEST_ON_CPU = 1e9  # parameters
ROOM = 1.3  # memory to have free, as a multiple of the weights


def base_lines(cfg: Config, method: str, tasks: TaskSet, parameters: int, place: Place) -> list[str]:
    """Lines on the base and some of the training problems, and on the methods that the page names for it."""
    why = _too_much(cfg, parameters, place)
    if why is None:
        some = tasks.at(ProblemSampler(len(tasks), cfg.seed).next(min(PROBLEMS, len(tasks))))
        try:
            found = measure(cfg, method, tasks, some)
            failed = why_nothing_was_scored(found.scores) if found.problems > 1 else None  # one may be at fault itself
            if failed is None:
                return said(found)
            why = f"the reward failed on all samples, first: {failed}"
        except (UserError, OSError, torch.OutOfMemoryError, FloatingPointError) as error:  # not the plan's fault
            why = str(error).splitlines()[0]
        finally:
            gc.collect()
            if place.on_gpu:  # for the estimates of later stages
                torch.cuda.empty_cache()
    return [f"base       not measured: {why}"]


def _too_much(cfg: Config, parameters: int, place: Place) -> str | None:
    """Why measuring would cost too much, if it would."""
    size, folder = parameters * DTYPES[cfg.model.dtype].itemsize, Path(model_folder(cfg.model.path))
    if place.rented is not None:
        return f"the run is meant for a GPU that is not here ({place.name})"
    if not any(folder.glob("*.safetensors")):
        return f"the weights of {cfg.model.path} are not in a folder of this machine"
    if not place.on_gpu and parameters > LARGEST_ON_CPU:
        return f"{parameters / 1e6:,.0f} M parameters are too many for this CPU"
    if not place.on_gpu and slow_dtype(cfg.model.dtype, "cpu"):
        return f"{cfg.model.dtype} is slow on this CPU"
    if ROOM * size > place.free:
        return f"weights of {size / 2**30:.1f} GiB need more memory than the {place.free / 2**30:.1f} GiB that are free"
    return None


def said(found: Found) -> list[str]:
    """Lines of what was found, and of the case on the page."""
    parts = []
    if found.asked:
        of = f"solves {found.solved} of {found.problems} problems" if found.problems else "no problem was finished"
        parts.append(f"{of} with {TRIES} samples each" + (f" in {SECONDS:g} s" if found.problems < found.asked else ""))
    if found.unlikely is not None:
        never = f", {found.never:.2%} never sampled (below {NEVER:.5f})" if found.never else ""
        parts.append(
            f"tokens of {found.traces} traces: probability {float(found.probs.mean()):.2f} in the mean, "
            f"{found.unlikely:.1%} of them unlikely (below {RARE:g}){never}"
        )
    case = found.case
    advice = [] if case is None else [f"method     {case.when}: {case.take} ({PAGE}; luffy compare tries it)"]
    return [f"base       {'; '.join(parts)}", *advice]
