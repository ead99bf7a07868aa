"""Which problems a step takes, and what is planned for them.

They come from the data in shuffled order and, where the method has one, from the replay (`replay`): the group of such
a problem has one of the policy's earlier successes in place of its last sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from luffy.config import RewardConfig
from luffy.data import ProblemSampler
from luffy.distributed.share import expected_tokens, share_out
from luffy.guidance import Plan
from luffy.guidance.plan import Planned
from luffy.metrics import Max, Mean, Metric
from luffy.train.replay import Attempt, Success, least_entropy
from luffy.train.run_state import Draw, Run
from luffy.types import Demonstration, Group, Sample, Task


@dataclass(frozen=True)
class Drawn:
    """This rank's problems of a batch: where each comes from, its place in the step, and by place the earlier success
    that is replayed."""

    draws: list[Draw]
    tasks: list[Task]
    positions: list[int]
    replayed: Mapping[int, Success]

    @property
    def visits(self) -> list[int]:
        return [draw.visit for draw in self.draws]

    @property
    def sources(self) -> dict[int, Draw]:
        """By place in the step."""
        return dict(zip(self.positions, self.draws, strict=True))

    def plan(self, run: Run, step: int) -> Plan:
        """``rollout.n`` samples a problem; of a replayed one the last is the earlier success."""
        plan = run.planner.plan(self.tasks, step, self.visits, run.trace_rewards, self.positions)
        groups = zip(self.positions, plan.groups, strict=True)
        return Plan(
            tuple((*g[:-1], _replay(g[-1], self.replayed[at])) if at in self.replayed else g for at, g in groups)
        )

    def metrics(self, run: Run, step: int) -> dict[str, Metric]:
        replay = run.memory.replay
        if replay is None:
            return {}
        return {
            "method/replay_size": Max(len(replay)),
            "method/replay_share": Mean.of(at in self.replayed for at in self.positions),
            "method/replay_age": Mean.of(step - success.step for success in self.replayed.values()),
        }


def _replay(instead_of: Planned, success: Success) -> Planned:
    """A trace that the policy itself wrote, with the log-probs that it was drawn with."""
    ids = tuple(success.token_ids.tolist())
    return Planned(instead_of.task, None, Demonstration(ids, tuple(success.log_probs.tolist())), len(ids))


def draw_share(run: Run, step: int, first: int) -> Drawn:
    """This rank's share of the next ``batch.problems`` problems; every rank draws all of them. ``first``: the place in
    the step of the first one."""
    r = run.cfg.rollout
    draws = draw_batch(run, step, first)
    tasks = [run.tasks[draw.row] for draw in draws]
    costs = [expected_tokens(task, r.n, r.max_tokens) for task in tasks]
    mine = share_out(costs, run.world.size)[run.world.rank]
    own = [draws[i] for i in mine]
    positions, tasks = [first + i for i in mine], [tasks[i] for i in mine]
    replayed = {} if all(d.source == "data" for d in draws) else choose_successes(run, positions, tasks, own)
    return Drawn(own, tasks, positions, replayed)


def draw_batch(run: Run, step: int, first: int) -> list[Draw]:
    """The problems of a batch over all ranks, those of each source evenly among the others."""
    wanted, replay = run.cfg.batch.problems, run.memory.replay
    again = [] if replay is None else replay.draw(int(run.cfg.replay.share * wanted), f"{run.cfg.seed}:{step}:{first}")
    return spread_evenly(
        [Draw(row, visit) for row, visit in zip(*draw(run.sampler, wanted - len(again)), strict=True)],
        [Draw(row, run.sampler.epoch, "replay") for row in again],
    )


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
        at: (task, problems[draw.row].successes)
        for at, task, draw in zip(positions, tasks, draws, strict=True)
        if draw.source == "replay"
    }
    scored = iter(run.policy.score([trace_sample(task, s.token_ids) for task, all_ in known.values() for s in all_]))
    return {at: least_entropy(all_, [next(scored)[1] for _ in all_]) for at, (_, all_) in known.items()}


def trace_sample(task: Task, token_ids: Sequence[int] | torch.Tensor) -> Sample:
    """A whole response that was given, in the SFT term alone."""
    ids = torch.as_tensor(token_ids).long()
    everywhere, nothing = torch.ones(ids.numel()), torch.zeros(ids.numel())
    return Sample(task.prompt_ids, ids, everywhere.bool(), nothing, everywhere, nothing, nothing, nothing)


def attempts(run: Run, step: int, groups: Mapping[int, Group], draws: Mapping[int, Draw]) -> list[Attempt]:
    """What the memory takes in of a step: the scored groups of all ranks, in the order of its problems."""
    mine = {at: _attempt(draws[at], group, step, run.cfg.reward) for at, group in groups.items()}
    every = {at: found for part in run.world.gather(mine) for at, found in part.items()}
    return [every[at] for at in sorted(every)]


def _attempt(draw: Draw, group: Group, step: int, cfg: RewardConfig) -> Attempt:
    own = [(r, s) for r, s in zip(group.rollouts, group.scores, strict=True) if r.is_on_policy]
    right = [rollout for rollout, score in own if cfg.solved(score.value)]
    successes = tuple(Success(r.token_ids.int(), r.behavior_log_probs, step) for r in right)
    return Attempt(draw.row, len(own), successes, replayed=draw.source == "replay")
