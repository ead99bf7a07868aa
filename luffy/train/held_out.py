"""Held-out evaluation during a training: which is due, its metrics, and which step is the best.

``evaluated.json`` in the run folder has the accuracy of every evaluation on record, by step. For older run folders
without it metrics.jsonl is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from luffy.config import Config, EvalConfig
from luffy.distributed.world import World
from luffy.files import json_object, write_atomically
from luffy.metrics import Mean, Metric
from luffy.rewards import Verifier
from luffy.rollout.engine import Engine
from luffy.run_folder.layout import EVALUATED, METRICS
from luffy.run_folder.recorder import read_json_lines
from luffy.seeds import seed_of
from luffy.step.groups import component_metrics, environment_metrics, failure_metrics, stop_if_nothing_was_scored
from luffy.step.play import Conversations, Player
from luffy.types import Group, Sample, Sampling, Task

ACCURACY, LOSS = "val-core/accuracy", "val-traces/loss"

Count = Callable[[int, int], None]
Seen = Callable[[str, list[Group]], None]


@dataclass
class HeldOut:
    """The held-out sets by name ("core" is data.eval) and what evaluates them. ``engine`` has the newest weights.

    ``traces`` are held out too, of which ``log_probs`` gives the log-probs of their tokens. ``evaluated`` is the score
    by step, of the evaluations on record: the accuracy, or with ``by_loss`` the mean probability of a token of
    ``traces``.
    """

    cfg: Config
    world: World
    sets: Mapping[str, list[Task]]
    engine: Engine
    verifier: Verifier | None
    tokenizer: Any
    eos_ids: tuple[int, ...]
    conversations: Conversations | None = None
    traces: Sequence[Sample] = ()
    log_probs: Callable[[Sequence[Sample]], Sequence[Tensor]] = lambda samples: ()
    by_loss: bool = False
    evaluated: dict[int, float] = field(default_factory=dict)

    def lacks(self, step: int) -> bool:
        """Whether something is held out and there is no evaluation of ``step`` on record."""
        return self.is_there and step not in self.evaluated

    @property
    def is_there(self) -> bool:
        return bool(self.sets or self.traces)

    def evaluate(
        self,
        step: int,
        cfg: EvalConfig | None,
        count: Count,
        seen: Seen | None = None,
    ) -> dict[str, Metric]:
        """Metrics of the current policy on every held-out set, over all ranks; ``cfg`` instead of the run's settings.
        Raises AllStopped if the reward failed for every response of a set.

        ``count`` is called with (done, total) from time to time and may raise to end the evaluation. ``seen`` gets the
        name of each set and the groups that this rank generated.
        """
        metrics: dict[str, Metric] = self.trace_loss() if self.traces else {}
        for name, tasks in self.sets.items():
            count(0, len(tasks))  # may end the evaluation before it begins the set
            of_set, groups = self.evaluate_set(name, tasks, step, cfg or self.cfg.eval, count)
            metrics |= of_set
            stop_if_nothing_was_scored(groups, self.world, f"the evaluation after step {step}")
            if seen is not None:
                seen(name, groups)
        return self.world.merge(metrics)

    def trace_loss(self) -> dict[str, Metric]:
        """Mean negative log-likelihood of a token of the held-out traces; this rank takes every n-th trace."""
        found = self.log_probs(self.traces[self.world.rank :: self.world.size])
        total = math.fsum(-float(log_probs.double().sum()) for log_probs in found)
        return {LOSS: Mean(total, sum(log_probs.numel() for log_probs in found))}

    def evaluate_set(
        self, name: str, tasks: Sequence[Task], step: int, cfg: EvalConfig, count: Count
    ) -> tuple[dict[str, Metric], list[Group]]:
        """Metrics of one set and its groups, one per problem: this rank takes every n-th problem of n ranks.

        ``val-<name>/accuracy`` is the mean over problems of the mean over ``cfg.n`` samples. Seeds do not change from
        one evaluation to the next.
        """
        assert self.verifier is not None, "there is no held-out data"
        sampling = Sampling(cfg.max_tokens or self.cfg.rollout.max_tokens, cfg.temperature, cfg.top_p, 0, self.eos_ids)

        mine = range(self.world.rank, len(tasks), self.world.size)
        keys = [[f"eval:{name}:{self.cfg.seed}:{i}:{k}" for k in range(cfg.n)] for i in mine]
        seeds = [(tasks[i], [seed_of(key) for key in of_problem]) for i, of_problem in zip(mine, keys, strict=True)]
        player = Player(self.engine, self.verifier, self.tokenizer, step, count, conversations=self.conversations)
        groups = player.answer(seeds, sampling)
        episodes = [episode for group in groups for episode in group.rollouts]
        scores = [s for group in groups for s in group.scores]
        metrics: dict[str, Metric] = {
            f"val-{name}/accuracy": Mean.of(self.cfg.reward.solved(s.value) for s in scores),
            f"val-{name}/score": Mean.of(s.value for s in scores),
            f"val-{name}/response_length": Mean.of(e.length for e in episodes),
            f"val-{name}/truncated": Mean.of(e.finish == "length" for e in episodes),
            **component_metrics(f"val-{name}", scores),
            **failure_metrics(f"val-{name}", scores),
            **{f"val-{name}/{key}": value for key, value in environment_metrics(groups).items()},
        }
        return metrics, groups

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the score among the recorded metrics of a step, if there is one."""
        metric = LOSS if self.by_loss else ACCURACY
        if metric in values:
            self.evaluated[step] = math.exp(-values[LOSS]) if self.by_loss else values[ACCURACY]
            self.write()

    def write(self) -> None:
        if self.world.is_main and self.is_there:
            write_atomically(self.cfg.folder / EVALUATED, json.dumps(self.evaluated))


def loss_of(score: float) -> float:
    """The loss whose mean probability of a token is ``score``."""
    return -math.log(score) if score > 0 else math.inf


def read_evaluated(folder: Path, through_step: int) -> dict[int, float]:
    """Accuracies of the evaluations on record up to a step. A run that begins at step 0 drops its records."""
    path = folder / EVALUATED
    if path.exists():
        kept = json_object(path.read_bytes(), path, f"delete it, and {METRICS} is read instead")
        found = {int(step): accuracy for step, accuracy in kept.items()}
    else:
        found = {row["step"]: row[ACCURACY] for row in read_json_lines(folder / METRICS) if ACCURACY in row}
    return {step: accuracy for step, accuracy in found.items() if through_step and step <= through_step}
