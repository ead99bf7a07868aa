"""The gate's place in a step: further rounds of episodes for the problems that it asks about.

Every rank takes part in every round, as engines may be shared and the model may be sharded: the ranks agree after each
round whether any of them needs another one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from luffy.data.prompts import SOLUTION
from luffy.guidance import FirstRound, Gate
from luffy.guidance.gate import SecondRounds
from luffy.metrics import Mean, Metric, Sum, merge_metrics
from luffy.models.load import decode
from luffy.step.draws import trace_sample
from luffy.step.play import play
from luffy.step.run_state import Draw, Run, StepBatch
from luffy.types import Demonstration, Episode, Group, Task


def gate(run: Run, drawn: Sequence[Draw], groups: Sequence[Group], batch: StepBatch) -> Sequence[Group]:
    """The groups after the rounds that the gate asks for."""
    gate = run.gate
    if gate is None:
        return groups
    merged, asked = list(groups), list(range(len(groups)))
    gated: set[int] = set()
    too_long: set[tuple[int, int]] = set()  # positions and levels of hints
    rounds = 0
    while batch.step >= run.cfg.guidance.gate_from and gate.may_go_on(rounds):
        rounds += 1
        firsts = {i: first_round(run, drawn[i], merged[i], batch.step, rounds, too_long) for i in asked}
        second = SecondRounds.of(gate, with_answer_probs(run, gate, firsts) if gate.answer_probs else firsts)
        if not any(run.world.gather(bool(second.rounds))):
            break
        merged = second.merge(merged, play(run, second.plan, batch))
        gated.update(second.rounds)
        asked = second.unfinished
    batch.metrics = merge_metrics([batch.metrics, gate_metrics(run, gate, merged, len(gated), len(too_long))])
    return merged


def first_round(
    run: Run, draw: Draw, group: Group, step: int, number: int, too_long: set[tuple[int, int]]
) -> FirstRound:
    """What the gate sees of one group; hints that do not fit go into ``too_long``."""
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
        text_of=partial(text_of, run),
        with_hint=partial(hinted_task, run, group.task, draw.position, too_long),
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


def hinted_task(
    run: Run, task: Task, position: int, too_long: set[tuple[int, int]], hint: str, level: int
) -> Task | None:
    """The task with a hint in its prompt; None where that is longer than ``data.max_prompt_tokens``."""
    hinted = run.tasks.encoder.with_hint(task, run.cfg.guidance.hint_text.replace(SOLUTION, hint), level)
    if len(hinted.prompt_ids) > run.cfg.data.max_prompt_tokens:
        too_long.add((position, level))  # a search may come to it in every round
        return None
    return hinted


def gate_metrics(run: Run, gate: Gate, groups: Sequence[Group], gated: int, too_long: int) -> dict[str, Metric]:
    """Fraction of groups that the gate changed, and how hints fared."""
    metrics: dict[str, Metric] = {"batch/gated": Sum(gated), "method/gated_share": Mean(gated, len(groups))}
    if not gate.uses_hints:
        return metrics
    levels = [{rollout.task.hint for rollout in group.rollouts} for group in groups]
    highest = max(run.world.gather(max((level for group in levels for level in group), default=0)))
    hinted = [s for g in groups for r, s in zip(g.rollouts, g.scores, strict=True) if r.task.hint]
    return metrics | {
        "method/hints_too_long": Sum(too_long),
        **{
            f"method/hint_{level}_share": Mean.of(level in group for group in levels) for level in range(1, highest + 1)
        },
        "method/hinted_solved": Mean.of(run.cfg.reward.solved(s.value) for s in hinted),
    }


def text_of(run: Run, ids: Sequence[int]) -> str:
    return decode(run.tokenizer, [list(ids)])[0]


def answer_probs(run: Run, tasks: Sequence[Task]) -> list[tuple[float, ...]]:
    """One number for each trace of each task: the mean probability that the policy gives the tokens of the gold answer.
    One pass over all traces; every rank must take part, be it without a task."""
    spans = [
        (task, *answer_place(run, trace.token_ids, task.problem.answer))
        for task in tasks
        for trace in task.demonstrations
    ]
    log_probs = run.policy.log_probs([trace_sample(task, Demonstration(ids)) for task, ids, _ in spans])
    probs = iter([float(values[start:].exp().mean()) for values, (_, _, start) in zip(log_probs, spans, strict=True)])
    return [tuple(next(probs) for _ in task.demonstrations) for task in tasks]


def answer_place(run: Run, ids: tuple[int, ...], answer: str) -> tuple[tuple[int, ...], int]:
    """The trace up to the end of the last place where it writes the answer, and where the answer's tokens begin. A
    trace that does not write it gets it in place of its end token."""
    place = last_place(ids, answer.strip(), partial(text_of, run))
    if place is not None:
        start, end = place
        return ids[:end], start
    body = ids[:-1] if ids[-1] in run.eos_ids else ids
    return (*body, *run.tokenizer(answer, add_special_tokens=False)["input_ids"]), len(body)


def last_place(ids: Sequence[int], words: str, text_of: Callable[[Sequence[int]], str]) -> tuple[int, int] | None:
    """The shortest range of tokens that holds the last occurrence of some words; None where there is none."""
    if not words or words not in text_of(ids):
        return None
    # The text from a token on holds the words up to some token and not beyond it; so does the text up to a token.
    start = bisect_left(range(len(ids)), True, key=lambda i: words not in text_of(ids[i + 1 :]))
    end = bisect_left(range(start, len(ids)), True, key=lambda i: words in text_of(ids[start : i + 1]))
    return start, start + end + 1
