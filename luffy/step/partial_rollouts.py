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

from luffy.distributed.world import World
from luffy.metrics import Max, Mean, Metric, Sum
from luffy.step.batch import Draw
from luffy.step.in_flight import InFlight
from luffy.types import Group


def still_in_flight(world: World, drawn: Sequence[Draw], groups: Sequence[Group], step: int) -> list[InFlight]:
    """The problems of all ranks with a response that is not finished, the oldest first."""
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
