"""Held-out traces: those of a file (``data.eval_traces``) and of training problems that are set apart
(``eval.hold_out``).

The choice does not depend on the seed, so that runs with different seeds are measured on the same traces; a problem
with the prompt of a held-out one leaves the training data too.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from luffy.config import Config
from luffy.data import Encoder
from luffy.errors import DataError
from luffy.seeds import seed_of
from luffy.step.draws import trace_sample
from luffy.step.tasks import TaskSet, load_problems_of
from luffy.types import Sample, Task


def hold_out_traces(cfg: Config, tasks: TaskSet, encoder: Encoder) -> tuple[TaskSet, list[Sample]]:
    """The training problems that are left, and every held-out trace."""
    left, held = take_out(tasks, cfg.eval.hold_out) if cfg.eval.hold_out else (tasks, [])
    if cfg.data.eval_traces is not None:
        problems = load_problems_of(cfg, cfg.data.eval_traces, cfg.data.eval_split, limit=None, require_answer=False)
        read = [task for task in encoder.encode_all(problems) if task is not None]
        if not any(task.demonstrations for task in read):
            raise DataError(f"no problem of data.eval_traces ({cfg.data.eval_traces}) has a trace that can be used")
        held = [*held, *read]
    return left, [trace_sample(task, demo) for task in held for demo in task.demonstrations]


def take_out(tasks: TaskSet, count: int) -> tuple[TaskSet, list[Task]]:
    """The task set without ``count`` problems that have traces, and those."""
    first = {prompt: index for index, prompt in reversed(list(enumerate(tasks.prompt_hashes)))}
    held: dict[int, Task] = {}
    for prompt in sorted(first, key=lambda prompt: seed_of(f"held out:{prompt}")):
        if len(held) == count:
            break
        if (task := tasks[first[prompt]]).demonstrations:
            held[prompt] = task
    kept = [index for index, prompt in enumerate(tasks.prompt_hashes) if prompt not in held]
    if len(held) < count or not any(tasks[index].demonstrations for index in kept):
        raise DataError(
            f"'eval.hold_out' ({count}) takes all of the {len(held)} problems that have traces; lower it, or name "
            "other traces in data.eval_traces"
        )
    left = replace(
        tasks,
        usable=[tasks.usable[index] for index in kept],
        prompt_hashes=array("Q", (tasks.prompt_hashes[index] for index in kept)),
        report={**tasks.report, "usable": len(kept), "held_out": len(tasks) - len(kept)},
    )
    return left, list(held.values())
