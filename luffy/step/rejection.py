"""Rejection: which groups of a step are kept. Ranks agree on it, and oversampling draws more until enough are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from luffy.config import Config
from luffy.conversations import without_failures
from luffy.distributed.world import World
from luffy.errors import AllStopped
from luffy.learn.credit import find_credit_function
from luffy.metrics import Max, Mean, Metric, Sum, merge_metrics
from luffy.step.draws import attempts
from luffy.step.groups import (
    environment_metrics,
    group_metrics,
    in_accuracy_band,
    is_extreme,
    override_metrics,
    own_metrics,
    staleness_metrics,
    stop_if_nothing_was_scored,
    why_none_is_solved,
)
from luffy.step.memory import InFlight
from luffy.step.run_state import Draw, Run, StepBatch
from luffy.types import Group


def reject(run: Run, drawn: Sequence[Draw], played: Sequence[Group], groups: Sequence[Group], batch: StepBatch) -> None:
    """Add the groups to the batch as kept or rejected, by what all ranks agree on. A group without all its scores is
    neither: it is in flight. ``played``: the groups before a gate changed any."""
    finished = {draw.position: group for draw, group in zip(drawn, groups, strict=True) if group.is_finished}
    initial = {draw.position: group for draw, group in zip(drawn, played, strict=True) if group.is_finished}
    batch.initial |= initial
    batch.draws |= {draw.position: draw for draw in drawn}
    if run.cfg.rollout.max_tokens_per_step is not None:
        batch.in_flight = still_in_flight(run.world, drawn, groups, batch.step)
        batch.metrics = merge_metrics([batch.metrics, part_metrics(drawn, groups, batch.step)])
    found = rollout_metrics(run, list(finished.values()), list(initial.values()), batch.step)
    batch.metrics = merge_metrics([batch.metrics, *found])
    kept = {position: without_failures(run.conversations, group) for position, group in finished.items()}
    batch.final |= kept
    rejected = run.world.union({position: _is_rejected(group, run.cfg) for position, group in kept.items()})
    for position, is_rejected in sorted(rejected.items()):
        (batch.dropped if is_rejected else batch.kept).append(position)


def wants_more(run: Run, batch: StepBatch) -> bool:
    """Whether another batch of problems is drawn: too few groups are kept, and ``oversample_rounds`` allows it."""
    wanted = run.cfg.batch.problems
    return len(batch.kept) < wanted and batch.drawn <= run.cfg.algorithm.oversample_rounds * wanted


def settle(run: Run, batch: StepBatch) -> None:
    """Number the groups once all are there. Raises AllStopped if the reward failed on all of them, or if
    ``oversample_rounds`` batches left too few."""
    wanted, rounds = run.cfg.batch.problems, run.cfg.algorithm.oversample_rounds
    stop_if_nothing_was_scored(batch.final.values(), run.world, f"step {run.progress.step + 1}")
    _judge_reward(run, batch.step, batch.final)
    if rounds and len(batch.kept) < wanted:
        raise AllStopped(
            f"stopped at step {run.progress.step + 1}: after {rounds} extra batches only {len(batch.kept)} of {wanted} "
            f"groups have unequal rewards and lie in the band of accuracy; the problems are too easy or too hard for "
            f"the policy: raise algorithm.oversample_rounds, lower batch.problems, or set "
            f"algorithm.oversample_rounds=0 to train on what is left"
        )
    batch.number(wanted if rounds else None)
    if run.memory.is_used:
        batch.attempts = attempts(run, batch)


def _judge_reward(run: Run, step: int, groups: Mapping[int, Group]) -> None:
    """Warn at the first step with scores if the reward seems unable to reach ``reward.success``."""
    if run.has_judged_reward:
        return
    run.has_judged_reward = any(run.world.gather(bool(groups)))  # a step of unfinished responses has none
    rules = run.conversations
    own = rules is not None and rules.counts_reward
    if warning := why_none_is_solved(groups.values(), run.cfg.reward, run.world, own):
        run.messages.warn(f"step {step + 1}: {warning}")


def rollout_metrics(
    run: Run, groups: Sequence[Group], initial: Sequence[Group], step: int
) -> list[Mapping[str, Metric]]:
    """What is measured on this rank's groups before any is rejected. ``initial``: before a gate changed any."""
    found: list[Mapping[str, Metric]] = [group_metrics(groups, run.cfg.reward), own_metrics(initial, run.cfg.reward)]
    if run.cfg.may_be_stale:
        found.append(staleness_metrics(groups, step))
    if run.prefetcher is None:
        found.append(run.engine.metrics())
    if run.cfg.rollout.overrides is not None:
        found.append(override_metrics(groups))
    if run.conversations is not None:
        found.append(environment_metrics(initial))
    return found


def _is_rejected(group: Group, cfg: Config) -> bool:
    """Rewards are all success or all failure (traces alone are kept where the credit function learns from them), or
    the policy's own accuracy lies outside the band."""
    a = cfg.algorithm
    if not in_accuracy_band(group, cfg.reward, a.min_accuracy, a.max_accuracy):
        return True
    keep_traces = find_credit_function(a.credit).lone_traces and group.has_traces_alone
    return a.reject_extreme and is_extreme(group, cfg.reward) and not keep_traces


def still_in_flight(world: World, drawn: Sequence[Draw], groups: Sequence[Group], step: int) -> list[InFlight]:
    """The problems of all ranks with a response that is not finished, the oldest first: with
    `rollout.max_tokens_per_step` a step never waits for one long response, and a group is learnt from in the step in
    which its last response ends. Where a response is cut depends on its tokens alone, so samples are the same on any
    number of ranks and after a resume."""
    own = {
        draw.position: InFlight.of(draw.row, draw.visit, drawn_in(draw, step), group.rollouts)
        for draw, group in zip(drawn, groups, strict=True)
        if not group.is_finished
    }
    return [problem for _, problem in sorted(world.union(own).items())]


def drawn_in(draw: Draw, step: int) -> int:
    """The step that drew the problem: ``step``, unless it was in flight."""
    return step if draw.in_flight is None else draw.in_flight.step


def part_metrics(drawn: Sequence[Draw], groups: Sequence[Group], step: int) -> dict[str, Metric]:
    """How many groups ended and go on, the tokens before those drawn now, and how many steps the groups took."""
    ages = [step - drawn_in(draw, step) for draw, group in zip(drawn, groups, strict=True) if group.is_finished]
    continued = sum(draw.in_flight.continued_tokens for draw in drawn if draw.in_flight is not None)
    return {
        "rollout/whole_groups": Sum(len(ages)),
        "rollout/under_way": Sum(len(groups) - len(ages)),
        "rollout/continued_tokens": Sum(continued),
        "rollout/age/mean": Mean.of(ages),
        "rollout/age/max": Max(max(ages, default=-math.inf)),
    }
