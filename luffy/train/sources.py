"""Where a step's samples come from: the policy's rollouts with their guidance, or traces alone (SFT)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.distributed.share import expected_tokens, share_out
from luffy.distributed.world import World
from luffy.errors import AllStopped
from luffy.guidance import Planner
from luffy.guidance.choice import choose
from luffy.metrics import Metric, Sum, merge_metrics, spread
from luffy.models.load import decode
from luffy.report.timing import Stopwatch
from luffy.rewards import Verifier
from luffy.rollout.engine import Engine
from luffy.train.ahead import Ahead
from luffy.train.credit import ScoredTokens, credit, find_credit_function, reward_kl_metrics, uncredited
from luffy.train.groups import group_metrics, is_extreme, override_metrics, score, staleness_metrics
from luffy.train.policy import Policy
from luffy.train.scorer import TokenScorer
from luffy.train.setup import TaskSet
from luffy.types import Group, Sample, Task


@dataclass
class StepBatch:
    """The samples of one step, per problem; ``rejected`` groups carry no signal and are kept for the record.

    ``samples`` has a place for every group of the step, empty where another process holds it; ``groups`` and
    ``rejected`` are this process's, and ``places`` says where those stand among all. ``metrics`` are over all.
    """

    samples: list[list[Sample]]
    metrics: dict[str, Metric]
    groups: list[Group] = field(default_factory=list)
    rejected: list[Group] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def shown(self, count: float) -> tuple[list[list[Sample]], list[Group]]:
        """This process's credited samples and rejected groups among the first ``count`` of the step."""
        own = [group for group in self.samples if group]
        credited = [g for g, place in zip(own, self.places, strict=False) if place < count]
        rejected = [g for g, place in zip(self.rejected, self.places[len(own) :], strict=True) if place < count]
        return credited, rejected


class Source(Protocol):
    def next(self, step: int) -> StepBatch: ...

    def state_dict(self) -> dict[str, int]:
        """Where in the data the next step begins."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def draw(sampler: ProblemSampler, count: int) -> tuple[list[int], list[int]]:
    """The next problems and how often each was drawn in earlier epochs."""
    first = sampler.epoch * sampler.size + sampler.state_dict()["position"]
    return sampler.next(count), [(first + i) // sampler.size for i in range(count)]


@dataclass(frozen=True)
class Rolled:
    """One process's groups of a batch by position, where the sampler stood after them, and what they took when they
    were made ahead."""

    groups: dict[int, Group]
    sampler: dict[str, int]
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Collected:
    """Groups of a step as they come in. ``groups`` are this process's, by position; ``kept`` and ``rejected``
    are positions over all processes, the same on each."""

    groups: dict[int, Group] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)

    def add(self, groups: Mapping[int, Group], extremes: Mapping[int, bool]) -> None:
        self.groups |= groups
        for position in sorted(extremes):
            (self.rejected if extremes[position] else self.kept).append(position)

    def of(self, positions: Sequence[int]) -> dict[int, Group]:
        """This process's groups among ``positions``, by their place in that list."""
        return {place: self.groups[p] for place, p in enumerate(positions) if p in self.groups}


class TraceSource:
    """SFT: one trace of each of the next problems."""

    def __init__(self, cfg: Config, tasks: TaskSet, watch: Stopwatch, world: World | None = None) -> None:
        self.cfg, self.tasks, self.watch, self.world = cfg, tasks, watch, world or World()
        self.sampler = ProblemSampler(len(tasks), cfg.seed)

    def next(self, step: int) -> StepBatch:
        with self.watch("plan"):
            rows, visits = draw(self.sampler, self.cfg.batch.problems)
            samples = [self._sample(self.tasks[i], visit) for i, visit in zip(rows, visits, strict=True)]
        lengths = [s.token_ids.numel() for s in samples]
        mine = share_out([len(s) for s in samples], self.world.size)[self.world.rank]
        places = set(mine)
        shared = [[s] if i in places else [] for i, s in enumerate(samples)]
        return StepBatch(shared, spread("response_length", lengths), places=mine)

    def state_dict(self) -> dict[str, int]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)

    def _sample(self, task: Task, visit: int) -> Sample:
        key = f"{self.cfg.seed}:{visit}:{task.problem.id}"
        (trace,) = choose(task.demonstrations, 1, self.cfg.guidance.trace_choice, visit=visit, key=key)
        ids = torch.tensor(trace.token_ids, dtype=torch.long)
        everywhere, nothing = torch.ones(ids.numel()), torch.zeros(ids.numel())
        return Sample(task.prompt_ids, ids, everywhere.bool(), nothing, everywhere, nothing, nothing, nothing)


class RolloutSource:
    """RL: plan, roll out, verify, reject, score tokens, assign credit (docs/methods.md)."""

    def __init__(
        self,
        cfg: Config,
        tasks: TaskSet,
        engine: Engine,
        verifier: Verifier,
        policy: Policy,
        reference: TokenScorer | None,
        eos_ids: tuple[int, ...],
        total_steps: int,
        watch: Stopwatch,
        progress: Callable[[int, int], None] | None = None,
        before_step: Callable[[int], None] = lambda step: None,
        world: World | None = None,
    ) -> None:
        self.before_step, self.world = before_step, world or World()
        self.cfg, self.tasks, self.engine, self.verifier = cfg, tasks, engine, verifier
        self.policy, self.reference, self.watch, self.progress = policy, reference, watch, progress
        self.tokenizer: Any = tasks.encoder.tokenizer
        self.sampler = ProblemSampler(len(tasks), cfg.seed)
        self.planner = Planner(
            n=cfg.rollout.n,
            n_prefix=cfg.guidance.n_prefix,
            sampling=replace(cfg.sampling, eos_ids=eos_ids),
            schedule=cfg.schedule(total_steps),
            trace_choice=cfg.guidance.trace_choice,
            seed=cfg.seed,
        )
        self.total_steps = total_steps
        self._trace_rewards: dict[str, list[float]] = {}
        self._taken = self.sampler.state_dict()
        self.ahead: Ahead[Rolled] | None = None

    def roll_out_ahead(self, copy_weights: Callable[[], None], total_steps: int) -> Ahead[Rolled]:
        """From now on batches come from a thread that works ahead, with weights that ``copy_weights`` takes over."""
        staleness = self.cfg.async_.max_staleness
        self.ahead = Ahead(self._roll_out_ahead, copy_weights, staleness, total_steps, self.policy.device)
        return self.ahead

    def state_dict(self) -> dict[str, int]:
        """After the last batch that was taken: one that is only made will be made again."""
        return dict(self._taken)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        self._taken = self.sampler.state_dict()

    def next(self, step: int) -> StepBatch:
        found, metrics = self._collect(step)
        kept, rejected = found.of(found.kept), found.of(found.rejected)
        if self.ahead is None:
            with self.watch("sleep"):
                self.engine.sleep()
        with self.watch("old_log_probs"):
            scored = self._score_tokens(list(kept.values()), len(found.kept))
        with self.watch("advantage"):
            samples = credit(list(kept.values()), scored, self.cfg.algorithm, step, self.total_steps)
        if self.cfg.algorithm.kl_coef and self.cfg.algorithm.kl_in == "reward":
            metrics |= reward_kl_metrics(scored, self.cfg.algorithm)
        advantages = [float(s.advantages[0]) for group in samples for s in group]
        metrics |= {**spread("critic/advantages", advantages), "batch/rejected": Sum(len(rejected))}
        own = dict(zip(kept, samples, strict=True))
        return StepBatch(
            [own.get(place, []) for place in range(len(found.kept))],
            self.world.merge(metrics),
            list(kept.values()),
            list(rejected.values()),
            [*kept, *(len(found.kept) + place for place in rejected)],
        )

    def _collect(self, step: int) -> tuple[Collected, dict[str, Metric]]:
        """Groups of one batch; with oversampling, of as many more as it takes to fill it, within bounds."""
        wanted, rounds = self.cfg.batch.problems, self.cfg.algorithm.oversample_rounds
        found = Collected()
        parts = []
        for attempt in range(rounds + 1):
            groups = self._next_groups(step, first_position=attempt * wanted)
            parts.append(group_metrics(list(groups.values()), self.cfg.reward))
            if self.ahead is None:
                parts.append(self.engine.metrics())
            else:
                parts.append(staleness_metrics(list(groups.values()), step))
            if self.cfg.rollout.guide is not None:
                parts.append(override_metrics(list(groups.values())))
            found.add(groups, self._extremes(groups))
            if len(found.kept) >= wanted:
                break
        if rounds and len(found.kept) < wanted:
            raise AllStopped(
                f"stopped at step {step + 1}: after {rounds} extra batches only {len(found.kept)} of {wanted} groups "
                f"have unequal rewards; the problems are too easy or too hard for the policy: raise "
                f"algorithm.oversample_rounds, lower batch.problems, or set algorithm.oversample_rounds=0 to train on "
                f"what is left"
            )
        del found.kept[wanted:]
        return found, merge_metrics(parts)

    def _extremes(self, groups: Mapping[int, Group]) -> dict[int, bool]:
        """By position, over all processes: whether a group's rewards are all success or all failure."""
        reject = self.cfg.algorithm.reject_extreme
        mine = {place: reject and is_extreme(group, self.cfg.reward) for place, group in groups.items()}
        return {place: extreme for part in self.world.gather(mine) for place, extreme in part.items()}

    def _next_groups(self, step: int, first_position: int) -> dict[int, Group]:
        """This process's groups of one batch, by their position in the step."""
        if self.ahead is None:
            rolled = self._roll_out(step, step, first_position, self.watch, self.progress)
        else:
            with self.watch("wait"):
                rolled = self.ahead.take(step)
            for phase, seconds in rolled.seconds.items():
                self.watch.seconds[phase] += seconds
        self._taken = rolled.sampler
        return rolled.groups

    def _roll_out_ahead(self, step: int, version: int, check: Callable[[], None]) -> Rolled:
        watch, version = Stopwatch(), self.engine.agree_on(version)
        return replace(self._roll_out(step, version, 0, watch, lambda done, total: check()), seconds=watch.seconds)

    def _roll_out(
        self,
        step: int,
        version: int,
        first_position: int,
        watch: Stopwatch,
        progress: Callable[[int, int], None] | None,
    ) -> Rolled:
        self.before_step(step)
        with watch("plan"):
            rows, visits = draw(self.sampler, self.cfg.batch.problems)
            tasks = [self.tasks[i] for i in rows]
            mine = self._my_share(tasks)
            places = [first_position + i for i in mine]
            plan = self.planner.plan(
                [tasks[i] for i in mine], step, [visits[i] for i in mine], self._rewards_of_traces, places
            )
        with watch("rollout"):
            completions = self.engine.generate(plan.requests, progress)
            rollouts = plan.assemble(completions, version=version)
        with watch("reward"):
            groups = score(rollouts, self.verifier, self.tokenizer)
        return Rolled(dict(zip(places, groups, strict=True)), self.sampler.state_dict())

    def _my_share(self, tasks: Sequence[Task]) -> list[int]:
        r = self.cfg.rollout
        costs = [expected_tokens(task, r.n, r.max_tokens) for task in tasks]
        return share_out(costs, self.world.size)[self.world.rank]

    def _rewards_of_traces(self, task: Task) -> list[float]:
        known = self._trace_rewards.get(task.problem.id)
        if known is None:
            ids = [list(d.token_ids) for d in task.demonstrations]
            texts = decode(self.tokenizer, ids)
            known = [s.value for s in self.verifier.score([(task.problem, text) for text in texts])]
            self._trace_rewards[task.problem.id] = known
        return known

    def _score_tokens(self, groups: Sequence[Group], groups_in_all: int) -> list[list[ScoredTokens]]:
        """Log-probs before the update: of the policy where it will take several optimizer steps (with one,
        old is current and no pass is spent), of the reference where a KL term needs it."""
        a, b = self.cfg.algorithm, self.cfg.batch
        several = b.mini_batch is not None and groups_in_all > b.mini_batch
        need_ref = a.kl_coef > 0
        need_old = several or (need_ref and a.kl_in == "reward") or bool(find_credit_function(a.credit).needs)
        flat = [uncredited(rollout) for group in groups for rollout in group.rollouts]
        nothing = [None] * len(flat)
        old = iter(self.policy.score(flat) if need_old else [(None, None)] * len(flat))
        ref = iter(self.policy.reference_log_probs(flat, self.reference) if need_ref else nothing)

        def next_tokens() -> ScoredTokens:
            log_probs, entropy = next(old)
            return ScoredTokens(log_probs, next(ref), entropy)

        return [[next_tokens() for _ in g.rollouts] for g in groups]
