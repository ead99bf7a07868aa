"""Where a step's samples come from: the policy's rollouts with their guidance, or traces alone (SFT)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.errors import TrainingStopped
from luffy.guidance import Planner
from luffy.guidance.choice import choose
from luffy.metrics import Metric, Sum, merge_metrics, spread
from luffy.report.timing import Stopwatch
from luffy.rewards import Verifier
from luffy.rollout.engine import Engine
from luffy.train.credit import (
    ScoredTokens,
    credit,
    group_metrics,
    is_extreme,
    override_metrics,
    reward_kl_metrics,
    score,
    without_credit,
)
from luffy.train.policy import Policy
from luffy.train.setup import TaskSet, with_eos
from luffy.types import Group, Sample, Task


@dataclass
class StepBatch:
    """The samples of one step, per problem; ``rejected`` groups carry no signal and are kept for the record."""

    samples: list[list[Sample]]
    metrics: dict[str, Metric]
    groups: list[Group] = field(default_factory=list)
    rejected: list[Group] = field(default_factory=list)


class Source(Protocol):
    sampler: ProblemSampler

    def next(self, step: int) -> StepBatch: ...


def draw(sampler: ProblemSampler, count: int) -> tuple[list[int], list[int]]:
    """The next problems and how often each was drawn in earlier epochs."""
    first = sampler.epoch * sampler.size + sampler.state_dict()["position"]
    return sampler.next(count), [(first + i) // sampler.size for i in range(count)]


class TraceSource:
    """SFT: one trace of each of the next problems."""

    def __init__(self, cfg: Config, tasks: TaskSet, watch: Stopwatch) -> None:
        self.cfg, self.tasks, self.watch = cfg, tasks, watch
        self.sampler = ProblemSampler(len(tasks), cfg.seed)

    def next(self, step: int) -> StepBatch:
        with self.watch("plan"):
            rows, visits = draw(self.sampler, self.cfg.batch.problems)
            samples = [self._sample(self.tasks[i], visit) for i, visit in zip(rows, visits, strict=True)]
        lengths = [s.token_ids.numel() for s in samples]
        return StepBatch([[s] for s in samples], spread("response_length", lengths))

    def _sample(self, task: Task, visit: int) -> Sample:
        key = f"{self.cfg.seed}:{visit}:{task.problem.id}"
        (trace,) = choose(task.demonstrations, 1, self.cfg.guidance.trace_choice, visit=visit, key=key)
        ids = torch.tensor(trace.token_ids, dtype=torch.long)
        everywhere = torch.ones(ids.numel(), dtype=torch.bool)
        nothing = torch.zeros(ids.numel())
        return Sample(task.prompt_ids, ids, everywhere, ~everywhere, everywhere, nothing, nothing, nothing)


class RolloutSource:
    """RL: plan, roll out, verify, reject, score tokens, assign credit (docs/methods.md)."""

    def __init__(
        self,
        cfg: Config,
        tasks: TaskSet,
        engine: Engine,
        verifier: Verifier,
        policy: Policy,
        reference: nn.Module | None,
        eos_ids: tuple[int, ...],
        total_steps: int,
        watch: Stopwatch,
        progress: Callable[[int, int], None] | None = None,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.before_step = before_step
        self.cfg, self.tasks, self.engine, self.verifier = cfg, tasks, engine, verifier
        self.policy, self.reference, self.watch, self.progress = policy, reference, watch, progress
        self.tokenizer: Any = tasks.encoder.tokenizer
        self.sampler = ProblemSampler(len(tasks), cfg.seed)
        self.planner = Planner(
            n=cfg.rollout.n,
            n_prefix=cfg.guidance.n_prefix,
            sampling=with_eos(cfg.sampling, eos_ids),
            schedule=cfg.schedule(total_steps),
            trace_choice=cfg.guidance.trace_choice,
            seed=cfg.seed,
        )
        self._trace_rewards: dict[str, list[float]] = {}

    def next(self, step: int) -> StepBatch:
        self.before_step(step)
        kept, rejected, metrics = self._collect(step)
        with self.watch("sleep"):
            self.engine.sleep()
        with self.watch("old_log_probs"):
            scored = self._score_tokens(kept)
        with self.watch("advantage"):
            samples = credit(kept, scored, self.cfg.algorithm)
        if self.cfg.algorithm.kl_coef and self.cfg.algorithm.kl_in == "reward":
            metrics |= reward_kl_metrics(scored, self.cfg.algorithm)
        advantages = [float(s.advantages[0]) for group in samples for s in group]
        metrics |= {**spread("critic/advantages", advantages), "batch/rejected": Sum(len(rejected))}
        return StepBatch(samples, metrics, kept, rejected)

    def _collect(self, step: int) -> tuple[list[Group], list[Group], dict[str, Metric]]:
        """Groups of one batch; with oversampling, of as many more as it takes to fill it, within bounds."""
        wanted, rounds = self.cfg.batch.problems, self.cfg.algorithm.oversample_rounds
        kept: list[Group] = []
        rejected: list[Group] = []
        parts = []
        for attempt in range(rounds + 1):
            groups = self._roll_out(step, first_position=attempt * wanted)
            parts += [group_metrics(groups, self.cfg.reward), self.engine.metrics()]
            if self.cfg.rollout.guide is not None:
                parts.append(override_metrics(groups))
            for group in groups:
                extreme = self.cfg.algorithm.reject_extreme and is_extreme(group, self.cfg.reward)
                (rejected if extreme else kept).append(group)
            if len(kept) >= wanted:
                break
        if rounds and len(kept) < wanted:
            raise TrainingStopped(
                f"stopped at step {step + 1}: after {rounds} extra batches only {len(kept)} of {wanted} groups have "
                f"unequal rewards; the problems are too easy or too hard for the policy: raise "
                f"algorithm.oversample_rounds, lower batch.problems, or set algorithm.oversample_rounds=0 to train on "
                f"what is left"
            )
        return kept[:wanted], rejected, merge_metrics(parts)

    def _roll_out(self, step: int, first_position: int) -> list[Group]:
        with self.watch("plan"):
            rows, visits = draw(self.sampler, self.cfg.batch.problems)
            tasks = [self.tasks[i] for i in rows]
            plan = self.planner.plan(tasks, step, visits, self._rewards_of_traces, first_position)
        with self.watch("rollout"):
            completions = self.engine.generate(plan.requests, self.progress)
            rollouts = plan.assemble(completions, version=step)
        with self.watch("reward"):
            return score(rollouts, self.verifier, self.tokenizer)

    def _rewards_of_traces(self, task: Task) -> list[float]:
        known = self._trace_rewards.get(task.problem.id)
        if known is None:
            ids = [list(d.token_ids) for d in task.demonstrations]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            known = [s.value for s in self.verifier.score([(task.problem, text) for text in texts])]
            self._trace_rewards[task.problem.id] = known
        return known

    def _score_tokens(self, groups: Sequence[Group]) -> list[list[ScoredTokens]]:
        """Log-probs before the update: of the policy where it will take several optimizer steps (with one,
        old is current and no pass is spent), of the reference where a KL term needs it."""
        a, b = self.cfg.algorithm, self.cfg.batch
        several = b.mini_batch is not None and len(groups) > b.mini_batch
        need_ref = a.kl_coef > 0
        need_old = several or (need_ref and a.kl_in == "reward")
        flat = [without_credit(rollout) for group in groups for rollout in group.rollouts]
        nothing = [None] * len(flat)
        old = iter(self.policy.log_probs(flat) if need_old else nothing)
        ref = iter(self.policy.reference_log_probs(flat, self.reference) if need_ref else nothing)
        return [[ScoredTokens(next(old), next(ref)) for _ in g.rollouts] for g in groups]
