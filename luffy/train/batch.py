"""The batch of one step: which groups are kept, the log-probs that their credit needs, and the mini-batches.

What surrounds the method is here: ranks (each takes its share, and all agree on what is kept), oversampling
(rolling out further batches until enough groups are kept) and taking a batch that was prefetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from luffy.config import Config
from luffy.distributed.share import share_out
from luffy.distributed.world import World
from luffy.errors import AllStopped
from luffy.metrics import Metric, Sum, merge_metrics, spread
from luffy.report.timing import Stopwatch
from luffy.train.credit import ScoredTokens, find_credit_function, needs_of, uncredited
from luffy.train.draws import attempts, chosen_trace, draw, trace_sample
from luffy.train.groups import (
    group_metrics,
    in_accuracy_band,
    is_extreme,
    override_metrics,
    own_metrics,
    staleness_metrics,
    stop_if_nothing_was_scored,
    why_none_is_solved,
)
from luffy.train.replay import Attempt
from luffy.train.run_state import Draw, RolloutBatch, Run
from luffy.train.under_way import UnderWay
from luffy.types import Group, Sample


@dataclass(frozen=True)
class BatchRequest:
    """One batch to roll out. ``version``: of the policy whose weights make it. ``first``: the position of its first
    problem in the step, which is not 0 when a step takes several batches."""

    step: int
    version: int
    first: int
    watch: Stopwatch
    progress: Callable[[int, int], None]


RollOut = Callable[[Run, BatchRequest], RolloutBatch]


@dataclass
class StepBatch:
    """What one step trains on. Groups are numbered over all ranks: the ``size`` kept ones first, then the rejected
    ones; the dictionaries hold this rank's, by that number. In SFT a group is one trace, and there are samples alone.
    ``sampler``, ``under_way`` and ``attempts``: what the run knows from then on (`update`)."""

    size: int
    metrics: dict[str, Metric]
    sampler: dict[str, int]
    groups: dict[int, Group] = field(default_factory=dict)
    rejected: dict[int, Group] = field(default_factory=dict)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    under_way: list[UnderWay] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    lessons: list[list[Sample]] = field(default_factory=list)  # traces, of an SFT step each

    def add(self, samples: Sequence[list[Sample]], metrics: Mapping[str, Metric], world: World) -> None:
        """The samples of this rank's kept groups, in their order; then the metrics become those of all ranks."""
        self.samples = dict(zip(self.groups, samples, strict=True))
        self.metrics = world.merge({**self.metrics, **metrics, "batch/rejected": Sum(len(self.rejected))})

    def mini_batches(self, parts: int) -> Iterator[list[Sample]]:
        """This rank's samples of every mini-batch, as many mini-batches on every rank."""
        return mini_batches([self.samples.get(i, []) for i in range(self.size)], parts)


def mini_batches(groups: Sequence[Sequence[Sample]], parts: int) -> Iterator[list[Sample]]:
    """The samples of the groups in ``parts`` mini-batches, whose numbers of groups differ by one at most. With fewer
    groups than ``parts`` each group is a mini-batch, and without a group there is none."""
    size, parts = len(groups), min(parts, len(groups))
    for part in range(parts):
        members = groups[size * part // parts : size * (part + 1) // parts]
        yield [sample for group in members for sample in group]


def updates(run: Run, batch: StepBatch, lr: float) -> Iterator[Callable[[], dict[str, Metric]]]:
    """The optimizer steps on a batch: one per mini-batch, then the SFT steps by an optimizer of their own."""
    for mini in batch.mini_batches(run.cfg.batch.updates):
        yield partial(run.policy.update, mini, lr)
    for traces in batch.lessons:
        yield partial(run.policy.sft_update, traces)


def draw_traces(run: Run) -> StepBatch:
    """SFT: one trace of each of the next problems, shared out among the ranks."""
    rows, visits = draw(run.sampler, run.cfg.batch.problems)
    tasks = run.tasks.at(rows)
    traces = [chosen_trace(run, task, visit, str(visit)) for task, visit in zip(tasks, visits, strict=True)]
    samples = [trace_sample(task, trace.token_ids) for task, trace in zip(tasks, traces, strict=True)]
    mine = share_out([len(s) for s in samples], run.world.size)[run.world.rank]
    lengths = spread("response_length", [s.token_ids.numel() for s in samples])
    return StepBatch(len(samples), lengths, run.sampler.state_dict(), samples={i: [samples[i]] for i in mine})


def collect(run: Run, step: int, roll_out: RollOut) -> StepBatch:
    """The groups of a step, kept and rejected: those of one batch, and with oversampling those of as many more as it
    takes to keep ``batch.problems`` of them. Raises AllStopped when ``oversample_rounds`` batches are not enough."""
    wanted, rounds = run.cfg.batch.problems, run.cfg.algorithm.oversample_rounds
    if run.memory.replay is not None:
        run.policy.remove_clip(run.cfg.algorithm.remove_clip and run.memory.replay.begun)
    own: dict[int, Group] = {}
    first: dict[int, Group] = {}
    draws: dict[int, Draw] = {}
    kept: list[int] = []
    rejected: list[int] = []
    parts: list[Mapping[str, Metric]] = []
    for attempt in range(rounds + 1):
        batch = _next_batch(run, step, attempt * wanted, roll_out)
        parts += [batch.metrics, *_rollout_metrics(run, batch, step)]
        own |= batch.groups
        first |= dict(zip(batch.groups, batch.first, strict=True))
        draws |= batch.draws
        for position, is_rejected in sorted(_rejections(run, batch.groups).items()):
            (rejected if is_rejected else kept).append(position)
        if len(kept) >= wanted:
            break
    stop_if_nothing_was_scored(own.values(), run.world, f"step {step + 1}")
    _judge_reward(run, step, own)
    if rounds and len(kept) < wanted:
        raise AllStopped(
            f"stopped at step {step + 1}: after {rounds} extra batches only {len(kept)} of {wanted} groups "
            f"have unequal rewards and lie in the band of accuracy; the problems are too easy or too hard for the "
            f"policy: raise algorithm.oversample_rounds, lower batch.problems, or set "
            f"algorithm.oversample_rounds=0 to train on what is left"
        )
    in_parts = run.cfg.rollout.max_tokens_per_step is not None
    under_way = sorted(run.world.union(batch.under_way).items()) if in_parts else []
    kept = kept[:wanted] if rounds else kept
    return StepBatch(
        len(kept),
        merge_metrics(parts),
        batch.sampler,
        groups={i: own[p] for i, p in enumerate(kept) if p in own},
        rejected={len(kept) + i: own[p] for i, p in enumerate(rejected) if p in own},
        under_way=[problem for _, problem in under_way],
        attempts=attempts(run, step, first, draws) if run.memory.is_used else [],
    )


def _judge_reward(run: Run, step: int, groups: Mapping[int, Group]) -> None:
    """Warn at the first step with scores if the reward seems unable to reach ``reward.success``."""
    if run.has_judged_reward:
        return
    run.has_judged_reward = any(run.world.gather(bool(groups)))  # a step of unfinished responses has none
    if warning := why_none_is_solved(groups.values(), run.cfg.reward, run.world):
        run.messages.warn(f"step {step + 1}: {warning}")


def _next_batch(run: Run, step: int, first: int, roll_out: RollOut) -> RolloutBatch:
    """The next batch of problems, rolled out now or prefetched."""
    if run.prefetcher is None:
        return roll_out(run, BatchRequest(step, step, first, run.watch, run.messages.count))

    def make(step: int, version: int, check: Callable[[], None]) -> RolloutBatch:
        watch, version = Stopwatch(), run.engine.agree_on(version)
        made = roll_out(run, BatchRequest(step, version, 0, watch, lambda done, total: check()))
        return replace(made, seconds=watch.seconds)

    with run.watch("wait"):
        batch = run.prefetcher.take(step, make)
    for phase, seconds in batch.seconds.items():
        run.watch.seconds[phase] += seconds
    return batch


def _rollout_metrics(run: Run, batch: RolloutBatch, step: int) -> Iterator[Mapping[str, Metric]]:
    groups = list(batch.groups.values())
    yield group_metrics(groups, run.cfg.reward)
    yield own_metrics(batch.first, run.cfg.reward)
    if run.cfg.may_be_stale:
        yield staleness_metrics(groups, step)
    if run.prefetcher is None:
        yield run.engine.metrics()
    if run.cfg.rollout.overrides is not None:
        yield override_metrics(groups)


def _rejections(run: Run, groups: Mapping[int, Group]) -> dict[int, bool]:
    """By position, over all ranks: whether a group is rejected."""
    return run.world.union({position: _is_rejected(group, run.cfg) for position, group in groups.items()})


def _is_rejected(group: Group, cfg: Config) -> bool:
    """Rewards are all success or all failure (traces alone are kept where the credit function learns from them), or
    the policy's own accuracy lies outside the band."""
    a = cfg.algorithm
    if not in_accuracy_band(group, cfg.reward, a.min_accuracy, a.max_accuracy):
        return True
    keep_traces = find_credit_function(a.credit).lone_traces and group.has_traces_alone
    return a.reject_extreme and is_extreme(group, cfg.reward) and not keep_traces


def needed_log_probs(cfg: Config, problems: int) -> tuple[range, bool]:
    """For which groups of a step the policy's log-probs before the update are computed, and whether those of the
    reference are, for a KL term. The policy's: for all groups where the KL in the reward or the credit function asks
    for them, else for those after the first mini-batch, in which old is current. Gradients through importance weights
    (``importance_detach: false``) would flow in the first mini-batch alone, so then all have old log-probs."""
    a = cfg.algorithm
    need_ref = a.kl_coef > 0
    mini_batches = max(1, min(cfg.batch.updates, problems))
    if (need_ref and a.kl_in == "reward") or needs_of(a) or (mini_batches > 1 and not a.importance_detach):
        return range(problems), need_ref
    return range(problems // mini_batches, problems), need_ref


def detach_notice(cfg: Config) -> list[str]:
    """A line when ``algorithm.importance_detach=false`` has no effect, else none."""
    if cfg.algorithm.importance_detach:
        return []
    if cfg.rollout.overrides is None and not cfg.may_be_stale:
        why = "there are no importance weights without token overrides or async.max_staleness"
    elif cfg.batch.updates > 1:
        why = (
            f"with {cfg.batch.updates} mini-batches a step the weights are those of the policy before the step, which "
            f"have no gradient; set batch.mini_batch={cfg.batch.problems} for one mini-batch"
        )
    elif needed_log_probs(cfg, cfg.batch.problems)[0]:
        why = "the credit function and a KL in the reward take the weights of the policy before the step"
    else:
        return []
    return [f"algorithm.importance_detach=false does nothing: {why}"]


def score_tokens(run: Run, batch: StepBatch) -> list[list[ScoredTokens]]:
    """Log-probs before the update: those of ``needed_log_probs``, and the teacher's where the credit function needs
    them."""
    need_old, need_ref = needed_log_probs(run.cfg, batch.size)
    groups = list(batch.groups.values())
    positions = [position for position, group in batch.groups.items() for _ in group.rollouts]
    count = len(positions)
    flat = [uncredited(r) for group in groups for r in group.rollouts] if need_old or need_ref else []
    later = [i for i, position in enumerate(positions) if position in need_old]
    found = dict(zip(later, run.policy.score([flat[i] for i in later]), strict=True)) if need_old else {}
    old = [found.get(i, (None, None)) for i in range(count)]
    ref = run.policy.reference_log_probs(flat, run.reference) if need_ref else [None] * count
    taught = [None] * count if run.teacher is None else run.teacher.score(groups)
    tokens = iter([ScoredTokens(o, r, entropy, t) for (o, entropy), r, t in zip(old, ref, taught, strict=True)])
    return [[next(tokens) for _ in group.rollouts] for group in groups]
