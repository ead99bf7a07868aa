"""The gate's place in a step: further rounds of episodes for the problems that it asks about.

Every rank takes part in every round, as engines may be shared and the model may be sharded: the ranks agree after each
round whether any of them needs another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from luffy.data.encode import SOLUTION
from luffy.guidance import FirstRound, Gate
from luffy.guidance.gate import SecondRounds
from luffy.metrics import Mean, Metric, Sum, merge_metrics
from luffy.models.load import decode
from luffy.step.answer_probs import answer_probs
from luffy.step.batch import Draw, StepBatch
from luffy.step.play import play
from luffy.step.run_state import Run
from luffy.types import Episode, Group, Task

TOO_LONG = "method/hints_too_long"


def gate(run: Run, drawn: Sequence[Draw], groups: Sequence[Group], batch: StepBatch) -> Sequence[Group]:
    """The groups after the rounds that the gate asks for."""
    gate = run.gate
    if gate is None:
        return groups
    merged, asked = list(groups), list(range(len(groups)))
    gated: set[int] = set()
    counts = Counter({TOO_LONG: 0})
    rounds = 0
    while batch.step >= run.cfg.guidance.gate_from and gate.may_go_on(rounds):
        rounds += 1
        firsts = {i: first_round(run, drawn[i], merged[i], batch.step, rounds, counts) for i in asked}
        second = SecondRounds.of(gate, with_answer_probs(run, gate, firsts) if gate.answer_probs else firsts)
        if not any(run.world.gather(bool(second.rounds))):
            break
        merged = second.merge(merged, play(run, second.plan, batch))
        gated.update(second.rounds)
        asked = second.unfinished
    batch.metrics = merge_metrics([batch.metrics, gate_metrics(run, gate, merged, len(gated), counts)])
    return merged


def first_round(run: Run, draw: Draw, group: Group, step: int, number: int, counts: Counter[str]) -> FirstRound:
    """What the gate sees of one group; ``counts`` counts the hints that do not fit."""
    reward = run.cfg.reward
    return FirstRound(
        group,
        step=step,
        visit=draw.visit,
        position=draw.position,
        planner=run.planner,
        solved=reward.solved,
        failed=reward.failed,
        score_traces=partial(run.trace_rewards, group.task),
        round=number,
        settings=run.cfg.guidance.gate.settings,
        text_of=lambda ids: decode(run.tokenizer, [list(ids)])[0],
        with_hint=partial(hinted_task, run, group.task, counts),
        recalled=recalled(run, draw),
    )


def recalled(run: Run, draw: Draw) -> Episode | None:
    """The policy's newest success at a problem, for a gate that asks for it."""
    replay, recalls = run.memory.replay, run.cfg.guidance.gate.part.recalls
    known = replay.problems.get(draw.row) if replay is not None and recalls else None
    return None if known is None else known.successes[-1].episode(draw.task)


def with_answer_probs(run: Run, gate: Gate, firsts: Mapping[int, FirstRound]) -> dict[int, FirstRound]:
    """Those of the groups about which the gate is asked, with how likely the gold answer is after each trace."""
    asked = {i: first for i, first in firsts.items() if gate.when(first)}
    probs = answer_probs(run, [first.group.task for first in asked.values()])
    return {i: replace(first, answer_probs=own) for (i, first), own in zip(asked.items(), probs, strict=True)}


def hinted_task(run: Run, task: Task, counts: Counter[str], hint: str, level: int) -> Task | None:
    """The task with a hint in its prompt; None where that is longer than ``data.max_prompt_tokens``."""
    hinted = run.tasks.encoder.with_hint(task, run.cfg.guidance.hint_text.replace(SOLUTION, hint), level)
    if len(hinted.prompt_ids) > run.cfg.data.max_prompt_tokens:
        counts[TOO_LONG] += 1
        return None
    return hinted


def gate_metrics(
    run: Run, gate: Gate, groups: Sequence[Group], gated: int, counts: Mapping[str, int]
) -> dict[str, Metric]:
    """Fraction of groups that the gate changed, and how hints fared."""
    metrics: dict[str, Metric] = {"batch/gated": Sum(gated), "method/gated_share": Mean(gated, len(groups))}
    if not gate.uses_hints:
        return metrics
    levels = [{rollout.task.hint for rollout in group.rollouts} for group in groups]
    highest = run.world.most(max((level for group in levels for level in group), default=0))
    hinted = [s for g in groups for r, s in zip(g.rollouts, g.scores, strict=True) if r.task.hint]
    return metrics | {
        **{name: Sum(count) for name, count in counts.items()},
        **{
            f"method/hint_{level}_share": Mean.of(level in group for group in levels) for level in range(1, highest + 1)
        },
        "method/hinted_solved": Mean.of(run.cfg.reward.solved(s.value) for s in hinted),
    }
