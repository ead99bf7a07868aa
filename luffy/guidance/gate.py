"""The gate: further rounds of a step, for problems whose responses ask for them.

When the responses of a step are scored, a gate function looks at each problem's group. It answers None, and the group
stays as it is; or a ``SecondRound``: which samples stay, and which are added. That covers

    replace or add samples     keep some, add a whole trace           SecondRound((0, 1, 2), (first.sample(0, trace),))
    redo the group             keep none, add samples that start      SecondRound((), tuple(first.sample(i, trace, 40)
                               from a longer prefix,                      for i in range(8)))
                               or whose prompt has a hint             first.sample(i, task=first.hint(1))
    keep the trace alone       keep its number, add nothing           SecondRound((0,), ())
    learn without the hint     keep what a hint helped                SecondRound((0, 4), drop_hints=True)

Added samples are generated, verified and credited like all others; one with a hint is trained with its hinted prompt.
A gate of several ``rounds`` is asked again about the groups to which it added samples, with the next ``first.round``.

A gate sees nothing but its ``FirstRound``, so it decides the same on any number of ranks and after a resume; a gate
that draws at random uses ``first.key``. The built-in gates are in built_in_gates.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from luffy.errors import ConfigError, UserError
from luffy.guidance.plan import Planner, whole_turns, without_hint
from luffy.guidance.row_hints import hints_of
from luffy.guidance.trace_choice import choose
from luffy.registry import Part, Registry
from luffy.schema import knob
from luffy.seeds import seed_of
from luffy.types import Demonstration, Episode, Group, Score, Task


@dataclass(frozen=True)
class SecondRound:
    """``keep``: indices of samples to retain. ``add``: samples to make, after them. ``least``: smallest reward of an
    added sample. ``drop_hints``: kept samples with a hint become responses to the prompt without it,
    whose tokens are off-policy."""

    keep: tuple[int, ...]
    add: tuple[Episode, ...] = ()
    least: float | None = None
    drop_hints: bool = False


@dataclass(frozen=True)
class GateSettings:
    """What a gate without settings of its own reads."""

    solved: int = knob(0, "most on-policy samples that may be correct", ge=0)
    samples: int = knob(1, "samples", ge=1)
    fractions: tuple[float, ...] = knob((0.25, 0.5, 0.75), "fractions of a trace, round by round")
    sizes: tuple[int, ...] = knob((2, 1, 1), "samples of each round")
    scores: tuple[float, ...] = knob((0.5, 2 / 3, 1.0), "scores, round by round")

    @property
    def shares(self) -> tuple[float, ...]:
        """The fractions, by their old name."""
        return self.fractions

    def check(self, where: str) -> None:
        check_fractions(self.fractions, where)


def check_fractions(fractions: Sequence[float], where: str) -> None:
    """A fraction of a trace is above 0 and at most 1."""
    if not all(0 < fraction <= 1 for fraction in fractions):
        raise ConfigError(f"'{where}.fractions' must be above 0 and at most 1, got {list(fractions)}")


@dataclass(frozen=True)
class FirstRound:
    """A problem's rewarded responses, as a gate sees them. ``step`` counts from 0; ``visit``: earlier visits of the
    problem; ``position``: its index in the step. ``solved`` and ``failed`` judge a reward. ``round``: the round to ask
    for, from 1. ``answer_probs``: for each trace the policy's probability of the gold answer in it. ``recalled``: the
    policy's newest success at the problem, for a gate that ``recalls``."""

    group: Group
    step: int
    visit: int
    position: int
    planner: Planner
    solved: Callable[[float], bool]
    failed: Callable[[float], bool]
    score_traces: Callable[[], Sequence[float]]
    round: int = 1
    settings: Any = field(default_factory=GateSettings)
    text_of: Callable[[Sequence[int]], str] = lambda ids: ""
    with_hint: Callable[[str, int], Task | None] = lambda text, level: None
    answer_probs: tuple[float, ...] = ()
    recalled: Episode | None = None

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
        """Numbers of the samples that were drawn with a hint in their prompt."""
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
        none, the beginning of ``trace()``, as long as the gate's setting ``fractions`` says. None where there is no
        such hint, or where the prompt would be longer than ``data.max_prompt_tokens``."""
        hints, shares = hints_of(self.group.task.problem), getattr(self.settings, "fractions", ())
        if hints:
            return self.with_hint(hints[level - 1], level) if level <= len(hints) else None
        trace = self.trace() if level <= len(shares) else None
        if trace is None:
            return None
        length = max(int(shares[level - 1] * len(trace.token_ids)), 1)
        shown = trace.token_ids[: (whole_turns(trace, length) or length) if trace.replies else length]
        return self.with_hint(self.text_of(shown), level)

    def actions(self, parts: int) -> list[str]:
        """Hints from the least to the most telling: the row's ``hints``; or, where it has none, the first turns of
        ``trace()`` as the teacher wrote them, one more in each, or ``parts`` equal shares of its only one."""
        if given := hints_of(self.group.task.problem):
            return list(given)
        trace = self.trace()
        if trace is None:
            return []
        turns = [self.text_of(turn).strip() for turn in trace.turns]
        if len(turns) > 1:
            return ["\n".join(turns[:count]) for count in range(1, len(turns) + 1)]
        ends = sorted({max(len(trace.token_ids) * part // parts, 1) for part in range(1, parts + 1)})
        return [self.text_of(trace.token_ids[:end]) for end in ends]

    def sample(
        self,
        number: int,
        demonstration: Demonstration | None = None,
        prefix: int | None = None,
        task: Task | None = None,
    ) -> Episode:
        """The ``number``-th added sample: the policy's own; or the first ``prefix`` tokens of a trace (None: all of it,
        and nothing is generated), which the policy continues. ``task``: with a hint, instead of the group's."""
        length = 0 if demonstration is None else len(demonstration.token_ids) if prefix is None else prefix
        return self.planner.planned(task or self.group.task, demonstration, length, seed_of(f"{self.key}:{number}"))


def always(first: FirstRound) -> bool:
    """Every problem."""
    return True


@dataclass(frozen=True)
class Gate(Part):
    """What ``gate_function`` registers; the fields are its arguments."""

    settings: type = GateSettings
    uses_traces: bool = False
    rounds: int | None = 1
    when: Callable[[FirstRound], bool] = always
    uses_hints: bool = False
    answer_probs: bool = False
    grows: bool = True
    leaves_a_trace_alone: bool = False
    replaces: int = 0
    needs_own: bool = False
    recalls: bool = False

    def __call__(self, first: FirstRound) -> SecondRound | None:
        return self.function(first) if self.when(first) else None

    def may_go_on(self, rounds: int) -> bool:
        """Whether it may ask for another round after so many."""
        return self.rounds is None or rounds < self.rounds


GATES: Registry[Gate] = Registry("gate", Gate, home="luffy.guidance.built_in_gates")


def gate_function(
    name: str,
    uses_traces: bool = False,
    rounds: int | None = 1,
    when: Callable[[FirstRound], bool] = always,
    uses_hints: bool = False,
    answer_probs: bool = False,
    *,
    settings: type = GateSettings,
    **facts: Any,
) -> Callable[[Callable[[FirstRound], SecondRound | None]], Gate]:
    """Register a gate for ``guidance.gate``: ``function(first)`` returns the next round of a problem, or None.

    ``when(first)``: whether to ask it. ``rounds``: most rounds; None: until it returns None or adds nothing.
    ``uses_traces``: the data must have traces; ``uses_hints``: traces or hints. ``answer_probs``: compute
    ``first.answer_probs``, with a forward pass over the traces. ``first.settings`` has its settings.

    Facts: ``grows`` (a group may become larger, default True), ``leaves_a_trace_alone``, ``replaces`` (number of
    on-policy samples that it replaces), ``needs_own`` (one of them must be left), ``recalls`` (the run
    stores correct responses for ``first.recalled``).
    """

    def register(function: Callable[[FirstRound], SecondRound | None]) -> Gate:
        gate = Gate(function, settings, uses_traces, rounds, when, uses_hints, answer_probs, **facts)
        GATES.register(name)(gate)
        return gate

    return register


def find_gate(name: str) -> Gate | None:
    """The registered gate of that name, or a user's own by ``module:function``; None for "none"."""
    return None if name == "none" else GATES.find(name, "guidance.gate")


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
    def plan(self) -> list[tuple[Episode, ...]]:
        return [second.add for second in self.rounds.values() if second.add]

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
            kept = [first.rollouts[k] for k in second.keep]
            if second.drop_hints:
                kept = [rollout if rollout.task.plain_ids is None else without_hint(rollout) for rollout in kept]
            rollouts = (*kept, *more.rollouts)
            scores = (*(first.scores[k] for k in second.keep), *(_at_least(s, second.least) for s in more.scores))
            merged[i] = Group(first.task, rollouts, scores)
        return merged


def _at_least(score: Score, least: float | None) -> Score:
    return score if least is None or score.value >= least else replace(score, value=least)
