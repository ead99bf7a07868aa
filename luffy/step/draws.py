"""Which problems a step takes, and what is planned for them.

They come from the data in shuffled order and, where the method has them,

    from the replay (`replay`)                  the last sample is one of the policy's earlier successes
    from the experts (`batch.expert_share`)     a whole trace and no on-policy sample
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.guidance import Planner, choose, given
from luffy.metrics import Max, Mean, Metric, merge_metrics, spread
from luffy.step.memory import Attempt, InFlight, MethodMemory, Success, least_entropy
from luffy.step.run_state import Draw, Run, StepBatch
from luffy.step.tasks import TaskSet
from luffy.types import Demonstration, Episode, Sample, Task

Row = tuple[int, int, Literal["data", "replay", "experts"]]  # in the data, how often it was drawn before, who drew it


class Planning(Protocol):
    """What a step is drawn and planned with: a run, or the part of it that a dry run builds."""

    cfg: Config
    tasks: TaskSet
    sampler: ProblemSampler
    memory: MethodMemory
    planner: Planner

    def trace_rewards(self, task: Task) -> list[float]: ...


def plan(run: Planning, drawn: Sequence[Draw], step: int) -> list[tuple[Episode, ...]]:
    """``rollout.n`` episodes a problem; the last one of a replayed problem is the earlier success, and an expert's
    problem has a trace alone. A problem in flight goes on with the episodes it has."""
    return [_episodes(run, draw, step) for draw in drawn]


def _episodes(run: Planning, draw: Draw, step: int) -> tuple[Episode, ...]:
    if draw.in_flight is not None:
        return draw.in_flight.episodes(draw.task, run.planner)
    if draw.source == "experts":
        return (given(draw.task, chosen_trace(run, draw.task, draw.visit, f"{step}:{draw.position}")),)
    group = run.planner.group(draw.task, step, draw.visit, draw.position, run.trace_rewards)
    if draw.replayed is not None:
        return (*group[:-1], draw.replayed.episode(draw.task))
    return group


def draw_metrics(run: Run, drawn: Sequence[Draw], step: int) -> dict[str, Metric]:
    """How much the memory holds, and how much of the batch comes from it."""
    metrics: dict[str, Metric] = {}
    if run.cfg.sft_steps.buffer:
        metrics["method/sft_buffer"] = Max(len(run.memory.lessons))
    if run.memory.replay is not None:
        metrics["method/replay_size"] = Max(len(run.memory.replay))
        metrics["method/replay_share"] = Mean.of(draw.replayed is not None for draw in drawn)
        metrics["method/replay_age"] = Mean.of(step - draw.replayed.step for draw in drawn if draw.replayed is not None)
    return metrics


def chosen_trace(run: Planning, task: Task, visit: int, key: str) -> Demonstration:
    """One of the task's traces, by ``guidance.trace_choice``; ``key`` tells this choice from others."""
    how = run.cfg.guidance.trace_choice
    rewards = run.trace_rewards(task) if how.part.needs_rewards else None
    (trace,) = choose(
        task.demonstrations, 1, how, visit=visit, key=f"{run.cfg.seed}:{key}:{task.problem.id}", rewards=rewards
    )
    return trace


def draw(run: Run, batch: StepBatch) -> list[Draw]:
    """This rank's share of the problems in flight, the oldest first, and of the next ``batch.problems``; every rank
    draws all of them."""
    r, old = run.cfg.rollout, run.memory.in_flight
    most = min(r.max_tokens_per_step or r.max_tokens, r.max_tokens)
    new = draw_batch(run, batch.step, batch.drawn)
    batch.drawn += run.cfg.batch.problems
    batch.sampler = run.sampler.state_dict()
    costs = [float(problem.continued_tokens + problem.unfinished * most) for problem in old]
    costs += [expected_tokens(draw.task, 1 if draw.source == "experts" else r.n, most) for draw in new]
    mine = share_out(costs, run.world.size)[run.world.rank]
    drawn = [_going_on(run, old[i], i - len(old)) if i < len(old) else new[i - len(old)] for i in mine]
    if any(draw.source == "replay" for draw in new):
        drawn = choose_successes(run, drawn)
    batch.metrics = merge_metrics([batch.metrics, draw_metrics(run, drawn, batch.step)])
    return drawn


def _going_on(run: Run, problem: InFlight, position: int) -> Draw:
    """A problem in flight; its position is negative, before those of the new problems."""
    return Draw(problem.row, problem.visit, position, run.tasks[problem.row], in_flight=problem)


def draw_batch(run: Planning, step: int, first: int) -> list[Draw]:
    """The problems of a batch over all ranks, those of each source evenly among the others. ``first``: the position of
    the first one in the step."""
    wanted, replay = run.cfg.batch.problems, run.memory.replay
    again = [] if replay is None else replay.draw(int(run.cfg.replay.share * wanted), f"{run.cfg.seed}:{step}:{first}")
    experts = draw_experts(run, run.cfg.batch.experts)
    fresh = draw_rows(run.sampler, wanted - len(again) - len(experts))
    rows = spread_evenly(
        [(row, visit, "data") for row, visit in zip(*fresh, strict=True)],
        [(row, run.sampler.epoch, "replay") for row in again],
        experts,
    )
    tasks = run.tasks.at([row for row, _, _ in rows])
    return [
        Draw(row, visit, first + i, task, source)
        for i, ((row, visit, source), task) in enumerate(zip(rows, tasks, strict=True))
    ]


def draw_experts(run: Planning, count: int) -> list[Row]:
    """The next problems that have a trace, in an order of their own."""
    drawn: list[Row] = []
    while len(drawn) < count:
        assert run.memory.experts is not None
        (row,), (visit,) = draw_rows(run.memory.experts, 1)
        if run.tasks[row].demonstrations:
            drawn.append((row, visit, "experts"))
    return drawn


def draw_rows(sampler: ProblemSampler, count: int) -> tuple[list[int], list[int]]:
    """The next problems and how often each was drawn in earlier epochs."""
    first = sampler.epoch * sampler.size + sampler.state_dict()["position"]
    return sampler.next(count), [(first + i) // sampler.size for i in range(count)]


def spread_evenly(*parts: Sequence[Row]) -> list[Row]:
    """All of them, so that any stretch of the result has about the same share of each part."""
    placed = [((i + 0.5) / len(part), row) for part in parts for i, row in enumerate(part)]
    return [row for _, row in sorted(placed, key=lambda pair: pair[0])]


def choose_successes(run: Run, drawn: Sequence[Draw]) -> list[Draw]:
    """The draws, a replayed one with the success of the least entropy under the policy as it is now; all ranks score
    theirs together."""
    assert run.memory.replay is not None
    problems = run.memory.replay.problems
    known = {draw.position: problems[draw.row].successes for draw in drawn if draw.source == "replay"}
    samples = [trace_sample(s.seen(draw.task), s.as_trace) for draw in drawn for s in known.get(draw.position, ())]
    scored = iter(run.policy.score(samples))
    chosen = {i: least_entropy(all_, [next(scored)[1] for _ in all_]) for i, all_ in known.items()}
    return [replace(draw, replayed=chosen.get(draw.position)) for draw in drawn]


def trace_sample(task: Task, trace: Demonstration) -> Sample:
    """A whole response that was given, in the SFT term alone, without the tokens of an environment."""
    whole = given(task, trace)
    nothing, counts = torch.zeros(len(trace.token_ids)), whole.off_policy.float()
    return Sample(
        task.prompt_ids, whole.token_ids, whole.authors, nothing, counts, nothing, nothing, nothing, calls=trace.calls
    )


def draw_traces(run: Run, batch: StepBatch) -> None:
    """SFT: one trace of each of the next problems, shared out among the ranks."""
    rows, visits = draw_rows(run.sampler, run.cfg.batch.problems)
    tasks = run.tasks.at(rows)
    traces = [chosen_trace(run, task, visit, str(visit)) for task, visit in zip(tasks, visits, strict=True)]
    samples = [trace_sample(task, trace) for task, trace in zip(tasks, traces, strict=True)]
    mine = share_out([len(s) for s in samples], run.world.size)[run.world.rank]
    lengths: dict[str, Metric] = spread("response_length", [s.sft_weights.sum().item() for s in samples])
    batch.size, batch.metrics, batch.sampler = len(samples), lengths, run.sampler.state_dict()
    batch.samples = {i: [samples[i]] for i in mine}


def attempts(run: Run, batch: StepBatch) -> list[Attempt]:
    """What the memory takes in of a step: the groups of all ranks as first sampled, in the order of its problems."""
    own = {i: _attempt(run, batch, i) for i in batch.initial}
    every = run.world.union(own)
    return [every[position] for position in sorted(every)]


def _attempt(run: Run, batch: StepBatch, position: int) -> Attempt:
    draw, group, step = batch.draws[position], batch.initial[position], batch.step
    own = [(r, s) for r, s in zip(group.rollouts, group.scores, strict=True) if r.is_own]
    right = [rollout for rollout, score in own if run.cfg.reward.solved(score.value)]
    if run.cfg.guidance.gate.part.recalls:  # and what the policy did with a hint
        final = batch.final[position]
        pairs = zip(final.rollouts, final.scores, strict=True)
        right += [r for r, s in pairs if r.task.hint and run.cfg.reward.solved(s.value)]
    successes = tuple(Success.of(r, draw.task, step) for r in right)
    lesson, task = None, group.task
    failed = own and all(run.cfg.reward.failed(score.value) for _, score in own)
    if run.cfg.sft_steps.buffer and failed and task.demonstrations:
        lesson = task.demonstrations.index(chosen_trace(run, task, draw.visit, f"{step}:lesson"))
    return Attempt(draw.row, len(own), successes, draw.source == "replay", lesson)


def lessons(run: Run) -> list[list[Sample]]:
    """This rank's samples of every SFT step that is due."""
    steps = []
    for due in run.memory.take_lessons():
        tasks = [(run.tasks[row], trace) for row, trace in due]
        samples = [trace_sample(task, task.demonstrations[trace]) for task, trace in tasks]
        mine = share_out([len(s) for s in samples], run.world.size)[run.world.rank]
        steps.append([samples[i] for i in mine])
    return steps


# ---- which process does which problems


def share_out(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices for each rank with close sums of costs: the most expensive first, each to the rank with the least. It
    depends on its arguments only, so every rank finds the same answer."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # cost, number, rank
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + costs[i], count + 1, rank))
    return [sorted(share) for share in shares]


def expected_tokens(task: Task, n: int, max_tokens: int) -> float:
    """Estimated tokens of a group of ``n`` responses; a trace's length stands for a response's. It must not depend on
    the run so far, or a resumed run would divide its work differently."""
    lengths = [len(d.token_ids) for d in task.demonstrations]
    response = sum(lengths) / len(lengths) if lengths else max_tokens / 2
    return len(task.prompt_ids) + n * response
