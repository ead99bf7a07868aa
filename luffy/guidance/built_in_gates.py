"""The gates that ``guidance.gate`` knows by name (docs/methods.md), each with its settings."""

from __future__ import annotations

from dataclasses import dataclass

from luffy.errors import ConfigError
from luffy.guidance.gate import FirstRound, SecondRound, check_fractions, gate_function
from luffy.registry import NoSettings
from luffy.schema import knob


@gate_function("none", rounds=0, settings=NoSettings, grows=False)
def no_gate(first: FirstRound) -> SecondRound | None:
    """Leave every group as it is."""
    return None


def own_failed(first: FirstRound) -> bool:
    """All on-policy samples failed, and there is at least one."""
    return bool(first.own) and all(first.failed(first.score(i)) for i in first.own)


@gate_function("trace_on_failure", uses_traces=True, when=own_failed, settings=NoSettings, grows=False, replaces=1)
def trace_on_failure(first: FirstRound) -> SecondRound | None:
    """Where all on-policy samples failed, a whole trace that the verifier accepts replaces the last one, unless the
    group has such a trace already."""
    if any(first.solved(score.value) for score in first.group.scores):
        return None
    trace = first.trace()
    if trace is None:
        return None
    kept = tuple(i for i in range(len(first.group.rollouts)) if i != first.own[-1])
    return SecondRound(kept, (first.sample(0, trace),))


@dataclass(frozen=True)
class TraceAlone:
    """Settings of trace_alone."""

    solved: int = knob(0, "acts if at most this many on-policy samples are correct", ge=0)


def few_solved(first: FirstRound) -> bool:
    """At most ``solved`` on-policy samples are correct, and there is at least one on-policy sample."""
    return bool(first.own) and sum(first.solved(first.score(i)) for i in first.own) <= first.settings.solved


def all_failed(first: FirstRound) -> bool:
    """All samples failed, whoever wrote them."""
    return all(first.failed(score.value) for score in first.group.scores)


@gate_function(
    "trace_alone", uses_traces=True, when=few_solved, settings=TraceAlone, grows=False, leaves_a_trace_alone=True
)
def trace_alone(first: FirstRound) -> SecondRound | None:
    """HPT: where at most ``solved`` on-policy samples are correct, a whole correct trace replaces the group."""
    trace = first.trace()
    return None if trace is None else SecondRound((), (first.sample(0, trace),))


@dataclass(frozen=True)
class LikeliestTraces:
    """Settings of likeliest_traces."""

    samples: int = knob(1, "on-policy samples that traces replace", ge=1)

    @property
    def replaces(self) -> int:
        return self.samples


@gate_function(
    "likeliest_traces", uses_traces=True, when=own_failed, answer_probs=True, settings=LikeliestTraces, grows=False,
    needs_own=True,
)  # fmt: skip
def likeliest_traces(first: FirstRound) -> SecondRound | None:
    """AMPO: where all on-policy samples failed, as many correct traces replace the last ``samples`` of them: those
    after which the policy finds the gold answer most likely. They score 1 or more."""
    ranked = sorted(first.right_traces(), key=lambda i: -first.answer_probs[i])[: first.settings.samples]
    if not ranked:
        return None
    gone = first.own[-len(ranked) :]
    kept = tuple(i for i in range(len(first.group.rollouts)) if i not in gone)
    traces = [first.group.task.demonstrations[i] for i in ranked]
    return SecondRound(kept, tuple(first.sample(i, trace) for i, trace in enumerate(traces)), least=1.0)


@dataclass(frozen=True)
class Hints:
    """Settings of gates that show hints."""

    fractions: tuple[float, ...] = knob((0.25, 0.5, 0.75), "fraction of a trace, by level or round")

    def check(self, where: str) -> None:
        check_fractions(self.fractions, where)


@gate_function("hinted_group", uses_hints=True, rounds=None, when=all_failed, settings=Hints, grows=False)
def hinted_group(first: FirstRound) -> SecondRound | None:
    """GHPO: where all samples failed, the group is done again with a hint in the prompt, from level to level until a
    sample does not fail or no level is left."""
    task = first.hint(first.round)
    if task is None:
        return None
    return SecondRound((), tuple(first.sample(i, task=task) for i in range(first.planner.n)))


@dataclass(frozen=True)
class LowestHint(Hints):
    """Settings of lowest_hint."""

    samples: int = knob(1, "samples per hint", ge=1)


@gate_function("lowest_hint", uses_hints=True, rounds=None, when=own_failed, settings=LowestHint, grows=False)
def lowest_hint(first: FirstRound) -> SecondRound | None:
    """Scaf-GRPO: where all on-policy samples failed, ``samples`` more are made with a hint in the prompt, from level to
    level until one is correct: it replaces the last on-policy sample. The other hinted samples are dropped."""
    unhinted = tuple(i for i in range(len(first.group.rollouts)) if i not in first.hinted)
    right = [i for i in first.hinted if first.solved(first.score(i))]
    if right:
        return SecondRound((*(i for i in unhinted if i != first.own[-1]), right[0]))
    task = first.hint(first.round)
    if task is None:
        return SecondRound(unhinted) if first.hinted else None
    return SecondRound(unhinted, tuple(first.sample(i, task=task) for i in range(first.settings.samples)))


@dataclass(frozen=True)
class ShortestHint:
    """Settings of shortest_hint."""

    samples: int = knob(2, "samples per hint", ge=1)
    parts: int = knob(8, "hint lengths in a trace of one turn", ge=1)

    @property
    def replaces(self) -> int:
        return self.samples


@gate_function("shortest_hint", uses_hints=True, rounds=None, when=own_failed, settings=ShortestHint, grows=False)
def shortest_hint(first: FirstRound) -> SecondRound | None:
    """ActGuide-RL: where all on-policy samples failed, a binary search finds the shortest hint of a teacher's actions
    with which one of ``samples`` is correct. Correct ones replace on-policy samples, as responses without the hint."""
    settings, right = first.settings, [i for i in first.hinted if first.solved(first.score(i))]
    levels = {i: first.group.rollouts[i].task.hint for i in first.hinted}
    hints, best = first.actions(settings.parts), min((levels[i] for i in right), default=None)
    low = max((level for level in levels.values() if best is None or level < best), default=0) + 1
    high = len(hints) if best is None else best - 1
    while low <= high:
        middle = (low + high) // 2
        task = first.with_hint(hints[middle - 1], middle)
        if task is not None:
            every = tuple(range(len(first.group.rollouts)))
            return SecondRound(every, tuple(first.sample(i, task=task) for i in range(settings.samples)))
        high = middle - 1  # it does not fit, nor does a longer one
    taken = [i for i in right if levels[i] == best][: len(first.own)]
    gone = {*first.hinted, *first.own[len(first.own) - len(taken) :]}
    kept = (*(i for i in range(len(first.group.rollouts)) if i not in gone), *taken)
    return SecondRound(kept, drop_hints=True) if first.hinted else None


@dataclass(frozen=True)
class OwnUnderPlan:
    """Settings of own_under_plan."""

    samples: int = knob(1, "samples per hint", ge=1)
    fraction: float = knob(1.0, "fraction of a trace in the plan, in whole turns", gt=0, le=1)

    @property
    def fractions(self) -> tuple[float, ...]:
        return (self.fraction,)


@gate_function(
    "own_under_plan", uses_hints=True, rounds=2, when=own_failed, settings=OwnUnderPlan, grows=False, replaces=1,
    recalls=True,
)  # fmt: skip
def own_under_plan(first: FirstRound) -> SecondRound | None:
    """BEPA: where all on-policy samples failed, the policy's newest success at the problem replaces the last one; or,
    if it had none, to what it does right with a trace in its prompt as a plan, as a response to the prompt without it;
    or else to a whole trace that the verifier accepts."""
    if first.round == 2 and not first.hinted:
        return None
    every = tuple(range(len(first.group.rollouts)))
    kept = tuple(i for i in every if i != first.own[-1] and i not in first.hinted)
    right = [i for i in first.hinted if first.solved(first.score(i))]
    if right:
        return SecondRound((*kept, right[0]), drop_hints=True)
    if first.recalled is not None:
        return SecondRound(kept, (first.recalled,))
    if first.round == 1 and (task := first.hint(1)) is not None:
        return SecondRound(every, tuple(first.sample(i, task=task) for i in range(first.settings.samples)))
    if (trace := first.trace()) is not None:
        return SecondRound(kept, (first.sample(0, trace),))
    return SecondRound((*kept, first.own[-1])) if first.hinted else None


@dataclass(frozen=True)
class MicroGroups:
    """Settings of micro_groups."""

    sizes: tuple[int, ...] = knob((2, 1, 1), "samples added to the first rollout.n, by round")
    fractions: tuple[float, ...] = knob((0.25, 0.5, 0.75), "fraction of a trace, by level or round")
    scores: tuple[float, ...] = knob((0.5, 2 / 3, 1.0), "mean score so far, below which a round has a prefix")

    def check(self, where: str) -> None:
        check_fractions(self.fractions, where)
        if not all(size >= 1 for size in self.sizes):
            raise ConfigError(f"'{where}.sizes' must be 1 or more, got {list(self.sizes)}")
        if not len(self.sizes) == len(self.fractions) == len(self.scores):
            raise ConfigError(
                f"gate micro_groups has a size, a fraction and a score for every round, but '{where}.sizes' has "
                f"{len(self.sizes)}, '{where}.fractions' {len(self.fractions)} and '{where}.scores' "
                f"{len(self.scores)}; give as many of each"
            )


@gate_function("micro_groups", uses_traces=True, rounds=None, settings=MicroGroups)
def micro_groups(first: FirstRound) -> SecondRound | None:
    """TRAPO: round r adds ``sizes[r - 1]`` samples. They begin with the fraction ``fractions[r - 1]`` of a correct
    trace if the mean score so far is below ``scores[r - 1]``, and are the policy's own otherwise."""
    settings, number = first.settings, first.round - 1
    if number == len(settings.sizes):
        return None
    scores = [score.value for score in first.group.scores]
    trace = first.trace() if sum(scores) / len(scores) < settings.scores[number] else None
    prefix = 0 if trace is None else first.planner.prefix_length(trace, settings.fractions[number])
    added = tuple(first.sample(i, trace, prefix) for i in range(settings.sizes[number]))
    return SecondRound(tuple(range(len(scores))), added)
