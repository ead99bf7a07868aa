"""Which problems a step takes, and what is planned for them.

They come from the data in shuffled order and, where the method has them,

    from the replay (`replay`)                  the last sample is one of the policy's earlier successes
    from the experts (`batch.expert_share`)     a whole trace and no own sample
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.distributed.share import expected_tokens, share_out
from luffy.guidance import Plan, Planner
from luffy.guidance.plan import Planned
from luffy.guidance.trace_choice import choose
from luffy.metrics import Max, Mean, Metric
from luffy.train.method_memory import MethodMemory
from luffy.train.replay import Attempt, Success, least_entropy
from luffy.train.run_state import Draw, Run
from luffy.train.tasks import TaskSet
from luffy.types import Demonstration, Group, Sample, Task


class Planning(Protocol):
    """What a step is drawn and planned with: a run, or the part of it that a dry run builds."""

    cfg: Config
    tasks: TaskSet
    sampler: ProblemSampler
    memory: MethodMemory
    planner: Planner

    def trace_rewards(self, task: Task) -> list[float]: ...


@dataclass(frozen=True)
class Drawn:
    """This rank's problems of a batch: where each comes from, its position in the step, and by position the earlier
    success that is replayed."""

    draws: list[Draw]
    tasks: list[Task]
    positions: list[int]
    replayed: Mapping[int, Success]

    @property
    def visits(self) -> list[int]:
        return [draw.visit for draw in self.draws]

    def plan(self, run: Planning, step: int) -> Plan:
        """``rollout.n`` samples a problem; of a replayed one the last is the earlier success, of an expert's a trace is
        all there is."""
        plan = run.planner.plan(self.tasks, step, self.visits, run.trace_rewards, self.positions)
        groups = list(plan.groups)
        for i, (draw, position, task) in enumerate(zip(self.draws, self.positions, self.tasks, strict=True)):
            if draw.source == "replay":
                groups[i] = (*groups[i][:-1], as_planned(task, self.replayed[position].as_trace))
            elif draw.source == "experts":
                groups[i] = (as_planned(task, chosen_trace(run, task, draw.visit, f"{step}:{position}")),)
        return Plan(tuple(groups))

    def metrics(self, run: Run, step: int) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        if run.cfg.sft_steps.buffer:
            metrics["method/sft_buffer"] = Max(len(run.memory.lessons))
        if run.memory.replay is not None:
            metrics["method/replay_size"] = Max(len(run.memory.replay))
            metrics["method/replay_share"] = Mean.of(position in self.replayed for position in self.positions)
            metrics["method/replay_age"] = Mean.of(step - success.step for success in self.replayed.values())
        return metrics


def as_planned(task: Task, trace: Demonstration) -> Planned:
    """A sample that is the whole trace."""
    return Planned(task, None, trace, len(trace.token_ids))


def chosen_trace(run: Planning, task: Task, visit: int, key: str) -> Demonstration:
    """One of the task's traces, by ``guidance.trace_choice``; ``key`` tells this choice from others."""
    how = run.cfg.guidance.trace_choice
    rewards = run.trace_rewards(task) if how == "best_reward" else None
    (trace,) = choose(
        task.demonstrations, 1, how, visit=visit, key=f"{run.cfg.seed}:{key}:{task.problem.id}", rewards=rewards
    )
    return trace


def draw_share(run: Run, step: int, first: int) -> Drawn:
    """This rank's share of the next ``batch.problems`` problems; every rank draws all of them. ``first``: the
    position in the step of the first one."""
    r = run.cfg.rollout
    draws = draw_batch(run, step, first)
    tasks = run.tasks.at([draw.row for draw in draws])
    costs = [
        expected_tokens(task, 1 if draw.source == "experts" else r.n, r.max_tokens)
        for task, draw in zip(tasks, draws, strict=True)
    ]
    mine = share_out(costs, run.world.size)[run.world.rank]
    own = [draws[i] for i in mine]
    positions, tasks = [first + i for i in mine], [tasks[i] for i in mine]
    any_replayed = any(draw.source == "replay" for draw in draws)
    replayed = choose_successes(run, positions, tasks, own) if any_replayed else {}
    return Drawn(own, tasks, positions, replayed)


def draw_batch(run: Planning, step: int, first: int) -> list[Draw]:
    """The problems of a batch over all ranks, those of each source evenly among the others."""
    wanted, replay = run.cfg.batch.problems, run.memory.replay
    again = [] if replay is None else replay.draw(int(run.cfg.replay.share * wanted), f"{run.cfg.seed}:{step}:{first}")
    experts = draw_experts(run, run.cfg.batch.experts)
    fresh = draw(run.sampler, wanted - len(again) - len(experts))
    return spread_evenly(
        [Draw(row, visit) for row, visit in zip(*fresh, strict=True)],
        [Draw(row, run.sampler.epoch, "replay") for row in again],
        experts,
    )


def draw_experts(run: Planning, count: int) -> list[Draw]:
    """The next problems that have a trace, in an order of their own."""
    drawn: list[Draw] = []
    while len(drawn) < count:
        assert run.memory.experts is not None
        (row,), (visit,) = draw(run.memory.experts, 1)
        if run.tasks[row].demonstrations:
            drawn.append(Draw(row, visit, "experts"))
    return drawn


def draw(sampler: ProblemSampler, count: int) -> tuple[list[int], list[int]]:
    """The next problems and how often each was drawn in earlier epochs."""
    first = sampler.epoch * sampler.size + sampler.state_dict()["position"]
    return sampler.next(count), [(first + i) // sampler.size for i in range(count)]


def spread_evenly(*parts: Sequence[Draw]) -> list[Draw]:
    """All of them, so that any stretch of the result has about the same share of each part."""
    placed = [((i + 0.5) / len(part), draw) for part in parts for i, draw in enumerate(part)]
    return [draw for _, draw in sorted(placed, key=lambda pair: pair[0])]


def choose_successes(
    run: Run, positions: Sequence[int], tasks: Sequence[Task], draws: Sequence[Draw]
) -> dict[int, Success]:
    """Of each replayed problem the success of the least entropy under the policy as it is now; all ranks score theirs
    together."""
    assert run.memory.replay is not None
    problems = run.memory.replay.problems
    known = {
        position: (task, problems[draw.row].successes)
        for position, task, draw in zip(positions, tasks, draws, strict=True)
        if draw.source == "replay"
    }
    scored = iter(run.policy.score([trace_sample(task, s.token_ids) for task, all_ in known.values() for s in all_]))
    return {position: least_entropy(all_, [next(scored)[1] for _ in all_]) for position, (_, all_) in known.items()}


def trace_sample(task: Task, token_ids: Sequence[int] | torch.Tensor) -> Sample:
    """A whole response that was given, in the SFT term alone."""
    ids = torch.as_tensor(token_ids).long()
    everywhere, nothing = torch.ones(ids.numel()), torch.zeros(ids.numel())
    return Sample(task.prompt_ids, ids, everywhere.bool(), nothing, everywhere, nothing, nothing, nothing)


def attempts(run: Run, step: int, groups: Mapping[int, Group], draws: Mapping[int, Draw]) -> list[Attempt]:
    """What the memory takes in of a step: the groups of all ranks as first sampled, in the order of its problems."""
    every = run.world.union({i: _attempt(run, step, draws[i], group) for i, group in groups.items()})
    return [every[position] for position in sorted(every)]


def _attempt(run: Run, step: int, draw: Draw, group: Group) -> Attempt:
    own = [(r, s) for r, s in zip(group.rollouts, group.scores, strict=True) if r.is_own]
    right = [rollout for rollout, score in own if run.cfg.reward.solved(score.value)]
    successes = tuple(Success(r.token_ids.int(), r.behavior_log_probs, step) for r in right)
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
        samples = [trace_sample(task, task.demonstrations[trace].token_ids) for task, trace in tasks]
        mine = share_out([len(s) for s in samples], run.world.size)[run.world.rank]
        steps.append([samples[i] for i in mine])
    return steps
