"""The gate: further rounds of a step, for problems whose responses ask for them.

When the responses of a step are scored, a gate function looks at each problem's group. It answers None, and the group
stays as it is; or a ``SecondRound``: which samples stay, and which are added. That covers

    replace or add samples     keep some, add a whole trace           SecondRound((0, 1, 2), (first.sample(0, trace),))
    redo the group             keep none, add samples that start      SecondRound((), tuple(first.sample(i, trace, 40)
                               from a longer prefix,                      for i in range(8)))
                               or whose prompt has a hint             first.sample(i, task=first.hint(1))
    keep the trace alone       keep its number, add nothing           SecondRound((0,), ())

Added samples are generated, verified and credited like all others; one with a hint is trained with its hinted prompt.
A gate of several ``rounds`` is asked again about the groups to which it added samples, with the next ``first.round``.

A gate sees nothing but its ``FirstRound``, so it decides the same on any number of ranks and after a resume; a gate
that draws at random uses ``first.key``. The built-in gates are in built_in_gates.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from luffy.errors import UserError
from luffy.guidance.plan import Plan, Planned, Planner
from luffy.guidance.row_hints import hints_of
from luffy.guidance.trace_choice import choose
from luffy.registry import Registry
from luffy.seeds import seed_of
from luffy.types import Demonstration, Group, Score, Task


@dataclass(frozen=True)
class SecondRound:
    """``keep``: numbers of samples that stay. ``add``: samples to make, behind them. ``least``: an added sample that
    scores less gets this score."""

    keep: tuple[int, ...]
    add: tuple[Planned, ...] = ()
    least: float | None = None


@dataclass(frozen=True)
class GateSettings:
    """The knobs ``guidance.gate_*``: what the built-in gates go by."""

    solved: int = 0
    samples: int = 1
    shares: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class FirstRound:
    """What a gate function sees: one problem's scored responses. ``step`` counts from 0, ``visit`` how often the
    problem was drawn before, ``position`` is its place in the step. ``solved`` and ``failed`` judge a score. ``round``
    is the number, from 1, of the round that the gate may ask for. ``answer_probs`` has for each trace the policy's
    probability of the gold answer where the trace writes it, if the gate was registered with ``answer_probs``.
    """

    group: Group
    step: int
    visit: int
    position: int
    planner: Planner
    solved: Callable[[float], bool]
    failed: Callable[[float], bool]
    score_traces: Callable[[], Sequence[float]]
    round: int = 1
    settings: GateSettings = field(default_factory=GateSettings)
    text_of: Callable[[Sequence[int]], str] = lambda ids: ""
    with_hint: Callable[[str, int], Task | None] = lambda text, level: None
    answer_probs: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """Names this problem in this round of this step of this run: the seed of whatever is drawn."""
        return f"{self._problem_key}:round {self.round}"

    @property
    def _problem_key(self) -> str:
        return self.planner.key(self.step, self.position, self.group.task)

    @property
    def own(self) -> list[int]:
        """Numbers of the samples that the policy wrote alone, without a hint."""
        return [i for i, rollout in enumerate(self.group.rollouts) if rollout.is_own]

    @property
    def hinted(self) -> list[int]:
        """Numbers of the samples that have a hint in their prompt."""
        return [i for i, rollout in enumerate(self.group.rollouts) if rollout.task.hint]

    def score(self, number: int) -> float:
        return self.group.scores[number].value

    def right_traces(self) -> list[int]:
        """Numbers of the traces that the verifier accepts."""
        return [i for i, score in enumerate(self.score_traces()) if self.solved(score)]

    def trace(self) -> Demonstration | None:
        """One of the traces that the verifier accepts, by ``guidance.trace_choice``, the same in every round."""
        right, scores = self.right_traces(), self.score_traces()
        if not right:
            return None
        traces = [self.group.task.demonstrations[i] for i in right]
        how, rewards = self.planner.trace_choice, [scores[i] for i in right]
        return choose(traces, 1, how, visit=self.visit, key=self._problem_key, rewards=rewards)[0]

    def hint(self, level: int) -> Task | None:
        """The task with the hint of that level (from 1) in its prompt: one of the row's ``hints``, or, where it has
        none, the beginning of ``trace()``, as long as ``guidance.gate_shares`` says. None where there is no such hint,
        or where the prompt would be longer than ``data.max_prompt_tokens``."""
        hints, shares = hints_of(self.group.task.problem), self.settings.shares
        if hints:
            return self.with_hint(hints[level - 1], level) if level <= len(hints) else None
        trace = self.trace() if level <= len(shares) else None
        if trace is None:
            return None
        shown = trace.token_ids[: max(int(shares[level - 1] * len(trace.token_ids)), 1)]
        return self.with_hint(self.text_of(shown), level)

    def sample(
        self,
        number: int,
        demonstration: Demonstration | None = None,
        prefix: int | None = None,
        task: Task | None = None,
    ) -> Planned:
        """The ``number``-th added sample: the policy's own; or the first ``prefix`` tokens of a trace (None: all of it,
        and nothing is generated), which the policy continues. ``task``: with a hint, instead of the group's."""
        length = 0 if demonstration is None else len(demonstration.token_ids) if prefix is None else prefix
        return self.planner.planned(task or self.group.task, demonstration, length, seed_of(f"{self.key}:{number}"))


def always(first: FirstRound) -> bool:
    """Every problem."""
    return True


@dataclass(frozen=True)
class Gate:
    """What ``gate_function`` registers; the fields are its arguments."""

    function: Callable[[FirstRound], SecondRound | None]
    uses_traces: bool = False
    rounds: int | None = 1
    when: Callable[[FirstRound], bool] = always
    uses_hints: bool = False
    answer_probs: bool = False

    def __call__(self, first: FirstRound) -> SecondRound | None:
        return self.function(first) if self.when(first) else None

    def may_go_on(self, rounds: int) -> bool:
        """Whether it may ask for another round after so many."""
        return self.rounds is None or rounds < self.rounds


GATES: Registry[Gate] = Registry("gate")


def gate_function(
    name: str,
    uses_traces: bool = False,
    rounds: int | None = 1,
    when: Callable[[FirstRound], bool] = always,
    uses_hints: bool = False,
    answer_probs: bool = False,
) -> Callable[[Callable[[FirstRound], SecondRound | None]], Gate]:
    """A decorator that registers a gate for ``guidance.gate``: ``function(first)`` returns the next round of a problem,
    or None.

    ``when(first)``: whether it is asked. ``rounds``: how often at most; None: until it returns None or adds nothing.
    ``uses_traces``, ``uses_hints``: it needs traces, or traces or hints, in the data. ``answer_probs``: it reads
    ``first.answer_probs``, which costs a forward pass over the traces.
    """
    return lambda function: GATES.register(name)(Gate(function, uses_traces, rounds, when, uses_hints, answer_probs))


def find_gate(name: str) -> Gate | None:
    """The registered gate of that name, or a user's own by ``module:function``; of "none" there is none."""
    if name == "none":
        return None
    found = GATES.find(name, "guidance.gate")
    return found if isinstance(found, Gate) else Gate(found)


@dataclass(frozen=True)
class SecondRounds:
    """One further round of a batch: what the gate asks for, by the number of the group."""

    rounds: dict[int, SecondRound]

    @staticmethod
    def of(gate: Gate, firsts: Mapping[int, FirstRound]) -> SecondRounds:
        found = {i: gate(first) for i, first in firsts.items()}
        rounds = {i: second for i, second in found.items() if second is not None}
        for i, second in rounds.items():
            if not second.keep and not second.add:
                raise UserError(f"'guidance.gate': no sample of problem {firsts[i].group.task.problem.id!r} is left")
        return SecondRounds(rounds)

    @property
    def plan(self) -> Plan:
        return Plan(tuple(second.add for second in self.rounds.values() if second.add))

    @property
    def unfinished(self) -> list[int]:
        """The groups that the gate may be asked about again: those that got samples."""
        return [i for i, second in self.rounds.items() if second.add]

    def merge(self, groups: Sequence[Group], added: Sequence[Group]) -> list[Group]:
        """The groups of the batch after this round; ``added`` are those of ``plan``."""
        merged, new = list(groups), iter(added)
        for i, second in self.rounds.items():
            first = groups[i]
            more = next(new) if second.add else Group(first.task, (), ())
            rollouts = (*(first.rollouts[k] for k in second.keep), *more.rollouts)
            scores = (*(first.scores[k] for k in second.keep), *(_at_least(s, second.least) for s in more.scores))
            merged[i] = Group(first.task, rollouts, scores)
        return merged


def _at_least(score: Score, least: float | None) -> Score:
    return score if least is None or score.value >= least else replace(score, value=least)
