"""Held-out evaluation during a training: which is due, its figures, and which step is the best.

``evaluated.json`` beside the records has the accuracy of every evaluation on record, by step. A run folder of before
that file existed is asked once, through its metrics.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from luffy.config import EvalConfig
from luffy.files import json_object, write_atomically
from luffy.guidance.plan import Plan, Planned
from luffy.metrics import Mean, Metric
from luffy.report.recorder import EVALUATED, METRICS, read_json_lines
from luffy.seeds import seed_of
from luffy.train.groups import component_metrics, failure_metrics, score, stop_if_nothing_was_scored
from luffy.train.run_state import Run
from luffy.types import Group, Request, Sampling, Task

ACCURACY = "val-core/accuracy"

Seen = Callable[[str, list[Group]], None]


class EvaluationInterrupted(Exception):
    """The run was asked to stop; the evaluation is made up for when it goes on."""


def is_missing(run: Run) -> bool:
    """Whether the evaluation due at this step is not on record: before the first step, or after a stop in it."""
    step = run.progress.step
    return bool(run.eval_tasks) and run.is_due(step, run.cfg.eval.every) and step not in run.evaluated


def evaluate(
    run: Run, cfg: EvalConfig | None = None, *, check: Callable[[], None] = lambda: None, seen: Seen | None = None
) -> dict[str, Metric]:
    """The policy as it is now on every held-out set, over all ranks; ``cfg`` instead of the run's own settings. Raises
    AllStopped where the reward failed for every response of a set.

    ``check`` is called from time to time and may raise EvaluationInterrupted. ``seen`` gets the name of each set and
    the groups that this rank generated.
    """
    metrics: dict[str, Metric] = {}

    def progress(done: int, total: int) -> None:
        check()
        run.messages.count(done, total)

    with run.watch("eval"):
        for name, tasks in run.eval_tasks.items():
            check()
            figures, groups = evaluate_set(run, name, tasks, cfg or run.cfg.eval, progress)
            metrics |= figures
            stop_if_nothing_was_scored(groups, run.world, f"the evaluation after step {run.progress.step}")
            if seen is not None:
                seen(name, groups)
    return run.world.merge(metrics)


def evaluate_set(
    run: Run, name: str, tasks: Sequence[Task], cfg: EvalConfig, progress: Callable[[int, int], None]
) -> tuple[dict[str, Metric], list[Group]]:
    """Figures of one set and what was generated, a group a problem: this rank takes every n-th problem of n ranks.

    ``val-<name>/accuracy`` is the mean over problems of the mean over ``cfg.n`` samples. Seeds do not change from one
    evaluation to the next.
    """
    assert run.verifier is not None, "there is no held-out data"
    sampling = Sampling(cfg.max_tokens or run.cfg.rollout.max_tokens, cfg.temperature, cfg.top_p, 0, run.eos_ids)

    def planned(i: int, k: int) -> Planned:
        seed = seed_of(f"eval:{name}:{run.cfg.seed}:{i}:{k}")
        return Planned(tasks[i], Request(tasks[i].prompt_ids, seed, sampling))

    mine = range(run.world.rank, len(tasks), run.world.size)
    plan = Plan(tuple(tuple(planned(i, k) for k in range(cfg.n)) for i in mine))
    completions = run.engines.current.generate(plan.requests, progress)
    groups = score(plan.assemble(completions, run.progress.step), run.verifier, run.tokenizer)
    scores = [s for group in groups for s in group.scores]
    metrics: dict[str, Metric] = {
        f"val-{name}/accuracy": Mean.of(run.cfg.reward.solved(s.value) for s in scores),
        f"val-{name}/score": Mean.of(s.value for s in scores),
        f"val-{name}/response_length": Mean.of(c.token_ids.numel() for c in completions),
        f"val-{name}/truncated": Mean.of(c.finish == "length" for c in completions),
        **component_metrics(f"val-{name}", scores),
        **failure_metrics(f"val-{name}", scores),
    }
    return metrics, groups


def note(run: Run, values: Mapping[str, float]) -> None:
    """Keep the accuracy among the figures of the last step, if there is one, once they are on record."""
    if ACCURACY in values:
        run.evaluated[run.progress.step] = values[ACCURACY]
        write_evaluated(run)


def note_best(run: Run) -> bool:
    """Whether the last step was evaluated and is better than every step before; the progress then says so."""
    progress = run.progress
    accuracy = run.evaluated.get(progress.step)
    if not run.cfg.train.keep_best or accuracy is None or accuracy <= progress.best_accuracy:
        return False
    progress.best_accuracy, progress.best_step = accuracy, progress.step
    return True


def forget_best(run: Run) -> None:
    """The next evaluation gives the best step so far: those before are of another run, or measured something else."""
    run.progress.best_step, run.progress.best_accuracy = None, -1.0


def write_evaluated(run: Run) -> None:
    if run.world.is_main and run.eval_tasks:
        write_atomically(run.cfg.folder / EVALUATED, json.dumps(run.evaluated))


def read_evaluated(folder: Path, through_step: int) -> dict[int, float]:
    """Accuracies of the evaluations on record up to a step. A run that begins at step 0 drops its records."""
    path = folder / EVALUATED
    if path.exists():
        kept = json_object(path.read_bytes(), path, f"delete it, and {METRICS} is read instead")
        found = {int(step): accuracy for step, accuracy in kept.items()}
    else:
        found = {row["step"]: row[ACCURACY] for row in read_json_lines(folder / METRICS) if ACCURACY in row}
    return {step: accuracy for step, accuracy in found.items() if through_step and step <= through_step}
