"""The gate: a second round of a step, for problems whose first responses ask for it.

When the responses of a step are scored, a gate function looks at each problem's group. It answers None, and the group
stays as it is; or a ``SecondRound``: which samples of the first round stay, and which are added. That covers

    replace or add samples     keep some, add a whole trace           SecondRound((0, 1, 2), (first.sample(0, trace),))
    redo the group             keep none, add samples that start      SecondRound((), tuple(first.sample(i, trace, 40)
                               from a longer prefix, or whose             for i in range(8)))
                               prompt has a hint                      first.sample(i, prompt_ids=hinted)
    keep the trace alone       keep its number, add nothing           SecondRound((0,), ())

Added samples are generated, verified and credited like all others. A gate sees nothing but its ``FirstRound``, so it
decides the same on any number of ranks and after a resume; a gate that draws at random uses ``first.key``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from luffy.errors import UserError
from luffy.guidance.plan import Plan, Planned, Planner, seed_of
from luffy.guidance.trace_choice import choose
from luffy.registry import Registry
from luffy.types import Demonstration, Group


@dataclass(frozen=True)
class SecondRound:
    """``keep``: numbers of first-round samples that stay. ``add``: samples to make, behind them."""

    keep: tuple[int, ...]
    add: tuple[Planned, ...] = ()


@dataclass(frozen=True)
class FirstRound:
    """What a gate function sees: one problem's scored responses. ``step`` counts from 0, ``visit`` how often the
    problem was drawn before, ``position`` is its place in the step. ``solved`` and ``failed`` judge a score."""

    group: Group
    step: int
    visit: int
    position: int
    planner: Planner
    solved: Callable[[float], bool]
    failed: Callable[[float], bool]
    score_traces: Callable[[], Sequence[float]]

    @property
    def key(self) -> str:
        """Names this problem in this step of this run: the seed of whatever is drawn."""
        return f"{self.planner.seed}:{self.step}:{self.position}:{self.group.task.problem.id}:second"

    @property
    def own(self) -> list[int]:
        """Numbers of the samples that the policy wrote alone."""
        return [i for i, rollout in enumerate(self.group.rollouts) if rollout.is_on_policy]

    def sample(
        self,
        number: int,
        demonstration: Demonstration | None = None,
        prefix: int | None = None,
        prompt_ids: tuple[int, ...] | None = None,
    ) -> Planned:
        """The ``number``-th added sample: the policy's own; or the first ``prefix`` tokens of a trace (None: all of it,
        and nothing is generated), which the policy continues. ``prompt_ids`` instead of the problem's own prompt."""
        task = self.group.task if prompt_ids is None else replace(self.group.task, prompt_ids=prompt_ids)
        length = 0 if demonstration is None else len(demonstration.token_ids) if prefix is None else prefix
        return self.planner.planned(task, demonstration, length, seed_of(f"{self.key}:{number}"))


@dataclass(frozen=True)
class Gate:
    """``function(first)`` returns the second round of a problem, or None. ``uses_traces``: without any trace in the
    data it is of no use."""

    function: Callable[[FirstRound], SecondRound | None]
    uses_traces: bool = False

    def __call__(self, first: FirstRound) -> SecondRound | None:
        return self.function(first)


GATES: Registry[Gate] = Registry("gate")


def gate_function(name: str, uses_traces: bool = False) -> Callable[[Callable[[FirstRound], SecondRound | None]], Gate]:
    """A decorator that registers a gate under the name that ``guidance.gate`` gives."""
    return lambda function: GATES.register(name)(Gate(function, uses_traces))


def find_gate(name: str) -> Gate | None:
    """The registered gate of that name, or a user's own by ``module:function``; of "none" there is none."""
    if name == "none":
        return None
    try:
        found = GATES[name]
    except UserError as error:
        raise UserError(f"'guidance.gate': {error}") from None
    return found if isinstance(found, Gate) else Gate(found)


@gate_function("trace_on_failure", uses_traces=True)
def trace_on_failure(first: FirstRound) -> SecondRound | None:
    """Where all own samples failed, the last of them gives way to a whole trace that the verifier accepts, unless the
    group has such a trace already."""
    group, own = first.group, first.own
    if not own or not all(first.failed(group.scores[i].value) for i in own):
        return None
    if any(first.solved(score.value) for score in group.scores):
        return None
    scored = zip(group.task.demonstrations, first.score_traces(), strict=True)
    verified = [(trace, score) for trace, score in scored if first.solved(score)]
    if not verified:
        return None
    traces, scores = [trace for trace, _ in verified], [score for _, score in verified]
    choice = first.planner.trace_choice
    (trace,) = choose(traces, 1, choice, visit=first.visit, key=first.key, rewards=scores)
    return SecondRound(tuple(i for i in range(len(group.rollouts)) if i != own[-1]), (first.sample(0, trace),))


@dataclass(frozen=True)
class SecondRounds:
    """The second rounds of a batch, by the number of their group."""

    rounds: dict[int, SecondRound]

    @staticmethod
    def of(gate: Gate, firsts: Sequence[FirstRound]) -> SecondRounds:
        found = {i: gate(first) for i, first in enumerate(firsts)}
        rounds = {i: second for i, second in found.items() if second is not None}
        for i, second in rounds.items():
            if not second.keep and not second.add:
                raise UserError(f"'guidance.gate': no sample of problem {firsts[i].group.task.problem.id!r} is left")
        return SecondRounds(rounds)

    @property
    def plan(self) -> Plan:
        return Plan(tuple(second.add for second in self.rounds.values() if second.add))

    def merge(self, groups: Sequence[Group], added: Sequence[Group]) -> list[Group]:
        """The groups of the batch after the second round; ``added`` are those of ``plan``."""
        merged, new = list(groups), iter(added)
        for i, second in self.rounds.items():
            first = groups[i]
            more = next(new) if second.add else Group(first.task, (), ())
            rollouts = (*(first.rollouts[k] for k in second.keep), *more.rollouts)
            merged[i] = Group(first.task, rollouts, (*(first.scores[k] for k in second.keep), *more.scores))
        return merged
