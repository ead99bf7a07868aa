"""The rounds of a rollout: responses to a plan, and more of them where the gate asks for it.

Every rank takes part in every round, as engines may be shared and the model may be sharded: the ranks agree after each
round whether any of them needs another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from luffy.data.hints import with_hint
from luffy.guidance import FirstRound, Gate, Plan
from luffy.guidance.gate import SecondRounds
from luffy.guidance.plan import rollout_of
from luffy.metrics import Mean, Metric, Sum
from luffy.models.load import decode
from luffy.rewards import Verifier
from luffy.rollout.native import NativeEngine
from luffy.train.answer_probs import answer_probs
from luffy.train.batch import BatchRequest
from luffy.train.draws import Drawn
from luffy.train.early_scores import EarlyScores
from luffy.train.groups import grouped, score
from luffy.train.run_state import Run
from luffy.types import Completion, Group, Rollout, Task

TOO_LONG = "method/hints_too_long"


def respond(run: Run, plan: Plan, at: BatchRequest) -> list[Group]:
    """Generate what a plan asks for, join it with the teacher's part and verify all of it."""
    assert run.verifier is not None
    if type(run.engine) is NativeEngine and run.verifier.may_score_early:  # others do not tell of each that ends
        return respond_scoring_early(run, run.engine, run.verifier, plan, at)
    with at.watch("rollout"):
        completions = run.engine.generate(plan.requests, at.progress)
        rollouts = plan.assemble(completions, version=at.version)
    with at.watch("reward"):
        return score(rollouts, run.verifier, run.tokenizer)


def respond_scoring_early(
    run: Run, engine: NativeEngine, verifier: Verifier, plan: Plan, at: BatchRequest
) -> list[Group]:
    """`respond`, where each response is joined and verified as soon as it ends."""
    planned = [sample for group in plan.groups for sample in group]
    asked = [i for i, sample in enumerate(planned) if sample.request is not None]
    rollouts: dict[int, Rollout] = {}
    with EarlyScores(verifier, run.tokenizer) as early:

        def add(finished: Mapping[int, Completion | None]) -> None:
            new = {i: rollout_of(planned[i], completion, at.version) for i, completion in finished.items()}
            rollouts.update(new)
            early.add([(i, rollout.task, rollout.token_ids) for i, rollout in new.items()])

        with at.watch("rollout"):
            add({i: None for i, sample in enumerate(planned) if sample.request is None})  # whole traces
            engine.generate(plan.requests, at.progress, lambda part: add({asked[i]: done for i, done in part}))
        with at.watch("reward"):
            in_order = (rollouts[i] for i in range(len(planned)))
            return grouped([tuple(next(in_order) for _ in group) for group in plan.groups], early.in_order())


def further_rounds(
    run: Run, gate: Gate, drawn: Drawn, groups: Sequence[Group], at: BatchRequest
) -> tuple[list[Group], dict[str, Metric]]:
    """The groups after the rounds that the gate asks for, and what was measured."""
    merged, asked = list(groups), list(range(len(groups)))
    gated: set[int] = set()
    counts = Counter({TOO_LONG: 0})
    rounds = 0
    while at.step >= run.cfg.guidance.gate_from and gate.may_go_on(rounds):
        rounds += 1
        firsts = {i: first_round(run, drawn, i, merged[i], at, rounds, counts) for i in asked}
        second = SecondRounds.of(gate, with_answer_probs(run, gate, firsts) if gate.answer_probs else firsts)
        if not any(run.world.gather(bool(second.rounds))):
            break
        merged = second.merge(merged, respond(run, second.plan, at))
        gated.update(second.rounds)
        asked = second.unfinished
    return merged, gate_metrics(run, gate, merged, len(gated), counts)


def first_round(
    run: Run, drawn: Drawn, i: int, group: Group, at: BatchRequest, number: int, counts: Counter[str]
) -> FirstRound:
    """What the gate sees of one group; ``counts`` counts the hints that do not fit."""
    reward = run.cfg.reward
    return FirstRound(
        group,
        step=at.step,
        visit=drawn.visits[i],
        position=drawn.positions[i],
        planner=run.planner,
        solved=reward.solved,
        failed=reward.failed,
        score_traces=partial(run.trace_rewards, group.task),
        round=number,
        settings=run.cfg.guidance.gate_settings(),
        text_of=lambda ids: decode(run.tokenizer, [list(ids)])[0],
        with_hint=partial(hinted_task, run, group.task, counts),
    )


def with_answer_probs(run: Run, gate: Gate, firsts: Mapping[int, FirstRound]) -> dict[int, FirstRound]:
    """Those of the groups about which the gate is asked, with how likely the gold answer is after each trace."""
    asked = {i: first for i, first in firsts.items() if gate.when(first)}
    probs = answer_probs(run, [first.group.task for first in asked.values()])
    return {i: replace(first, answer_probs=own) for (i, first), own in zip(asked.items(), probs, strict=True)}


def hinted_task(run: Run, task: Task, counts: Counter[str], hint: str, level: int) -> Task | None:
    """The task with a hint in its prompt; None where that is longer than ``data.max_prompt_tokens``."""
    ids = run.tasks.encoder.prompt_ids(with_hint(task.problem, run.cfg.guidance.hint_text, hint))
    if len(ids) > run.cfg.data.max_prompt_tokens:
        counts[TOO_LONG] += 1
        return None
    return replace(task, prompt_ids=ids, hint=level)


def gate_metrics(
    run: Run, gate: Gate, groups: Sequence[Group], gated: int, counts: Mapping[str, int]
) -> dict[str, Metric]:
    """Of how many problems the gate changed the group, and what became of hints."""
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
