"""Partial rollouts: no response takes more than `rollout.max_tokens_per_step` tokens in a step.

    step 0   begins problems A B C    A ends
    step 1   goes on with B C, begins D E F    C D F end
    step 2   goes on with B E, begins ...

A group is learnt from in the step in which its last response ends. A step then never waits for one long response.
Where a response is cut depends on its tokens alone, not on who was faster: samples are the same on any number of ranks
and after a resume. Noise is a function of seed and position, so a response goes on as it would have under the same
weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from luffy.distributed.share import expected_tokens, share_out
from luffy.guidance import Plan
from luffy.guidance.plan import Planned
from luffy.metrics import Max, Mean, Metric, Sum
from luffy.train.batch import BatchRequest
from luffy.train.draws import Drawn, draw_batch
from luffy.train.groups import score
from luffy.train.run_state import Draw, RolloutBatch, Run
from luffy.train.under_way import PartialResponse, UnderWay
from luffy.types import Group


def roll_out_in_parts(run: Run, at: BatchRequest) -> RolloutBatch:
    """The first half of an RL step as `roll_out` makes it, where only whole groups leave it."""
    with at.watch("plan"):
        mine = take_share(run, at.step)
    with at.watch("rollout"):
        own = dict(zip(mine, go_on(run, list(mine.values()), at), strict=True))
    whole = {place: problem for place, problem in own.items() if problem.is_whole}
    with at.watch("reward"):
        groups = groups_of(run, list(whole.values()), at)
    return RolloutBatch(
        groups=dict(zip(whole, groups, strict=True)),
        draws={place: Draw(problem.row, problem.visit) for place, problem in whole.items()},
        sampler=run.sampler.state_dict(),
        first=groups,
        metrics=part_metrics(list(mine.values()), list(own.values()), at.step),
        under_way={place: problem for place, problem in own.items() if not problem.is_whole},
    )


def take_share(run: Run, step: int) -> dict[int, UnderWay]:
    """This rank's share of the problems under way and of ``batch.problems`` new ones, by place: the oldest first."""
    old, r = run.memory.under_way, run.cfg.rollout
    most = min(r.max_tokens_per_step or r.max_tokens, r.max_tokens)
    new = draw_batch(run, step, 0)
    costs = [float(problem.continued_tokens + problem.unfinished * most) for problem in old]
    costs += [expected_tokens(run.tasks[draw.row], r.n, most) for draw in new]
    return {
        place: old[place] if place < len(old) else begin(run, new[place - len(old)], place - len(old), step)
        for place in share_out(costs, run.world.size)[run.world.rank]
    }


def begin(run: Run, draw: Draw, position: int, step: int) -> UnderWay:
    """A problem of this step, planned as ever; no token is drawn yet."""
    task = run.tasks[draw.row]
    (group,) = Drawn([draw], [task], [position], {}).plan(run, step).groups
    ids, log_probs = torch.empty(0, dtype=torch.long), torch.empty(0)

    def response(planned: Planned) -> PartialResponse:
        trace = -1 if planned.demonstration is None else task.demonstrations.index(planned.demonstration)
        if planned.request is None:
            return PartialResponse(trace, planned.prefix, 0, "trace", ids, log_probs, ids)
        return PartialResponse(trace, planned.prefix, planned.request.seed, None, ids, log_probs, ids)

    return UnderWay(draw.row, draw.visit, step, tuple(response(planned) for planned in group))


def plan_of(run: Run, problem: UnderWay) -> tuple[Planned, ...]:
    """What was planned for it when it was drawn."""
    task = run.tasks[problem.row]
    return tuple(
        run.planner.planned(task, None if r.trace < 0 else task.demonstrations[r.trace], r.prefix, r.seed)
        for r in problem.responses
    )


def go_on(run: Run, problems: Sequence[UnderWay], at: BatchRequest) -> list[UnderWay]:
    """The problems with the next tokens of every response that is not finished."""
    most = run.cfg.rollout.max_tokens_per_step
    assert most is not None
    plans = [plan_of(run, problem) for problem in problems]
    pairs = [list(zip(p.responses, plan, strict=True)) for p, plan in zip(problems, plans, strict=True)]
    requests = [
        response.next_request(planned.request, most)
        for group in pairs
        for response, planned in group
        if response.finish is None and planned.request is not None
    ]
    drawn = iter(run.engine.generate(requests, at.progress))

    def extended(response: PartialResponse, planned: Planned) -> PartialResponse:
        if response.finish is not None or planned.request is None:
            return response
        return response.extended(next(drawn), planned.request.sampling.max_tokens, at.version)

    return [
        UnderWay(p.row, p.visit, p.step, tuple(extended(*pair) for pair in group))
        for p, group in zip(problems, pairs, strict=True)
    ]


def groups_of(run: Run, problems: Sequence[UnderWay], at: BatchRequest) -> list[Group]:
    """Whole problems as groups, verified."""
    assert run.verifier is not None
    completions = [r.completion for problem in problems for r in problem.responses if r.finish != "trace"]
    plan = Plan(tuple(plan_of(run, problem) for problem in problems))
    return score(plan.assemble(completions, at.version), run.verifier, run.tokenizer)


def part_metrics(before: Sequence[UnderWay], after: Sequence[UnderWay], step: int) -> dict[str, Metric]:
    whole = [problem for problem in after if problem.is_whole]
    ages = [step - problem.step for problem in whole]
    return {
        "rollout/whole_groups": Sum(len(whole)),
        "rollout/under_way": Sum(len(after) - len(whole)),
        "rollout/continued_tokens": Sum(sum(problem.continued_tokens for problem in before)),
        "rollout/age/mean": Mean.of(ages),
        "rollout/age/max": Max(max(ages, default=-math.inf)),
    }
