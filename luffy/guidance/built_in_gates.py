"""The gates that ``guidance.gate`` knows by name (docs/methods.md)."""

from __future__ import annotations

from luffy.guidance.gate import FirstRound, SecondRound, gate_function


def own_failed(first: FirstRound) -> bool:
    """All own samples failed, and there is at least one."""
    return bool(first.own) and all(first.failed(first.score(i)) for i in first.own)


@gate_function("trace_on_failure", uses_traces=True, when=own_failed)
def trace_on_failure(first: FirstRound) -> SecondRound | None:
    """Where all own samples failed, the last of them gives way to a whole trace that the verifier accepts, unless the
    group has such a trace already."""
    if any(first.solved(score.value) for score in first.group.scores):
        return None
    trace = first.trace()
    if trace is None:
        return None
    kept = tuple(i for i in range(len(first.group.rollouts)) if i != first.own[-1])
    return SecondRound(kept, (first.sample(0, trace),))


def few_solved(first: FirstRound) -> bool:
    """At most ``guidance.gate_solved`` own samples are right, and there is at least one own sample."""
    return bool(first.own) and sum(first.solved(first.score(i)) for i in first.own) <= first.settings.solved


def all_failed(first: FirstRound) -> bool:
    """All samples failed, whoever wrote them."""
    return all(first.failed(score.value) for score in first.group.scores)


@gate_function("trace_alone", uses_traces=True, when=few_solved)
def trace_alone(first: FirstRound) -> SecondRound | None:
    """HPT: where at most ``gate_solved`` own samples are right, a whole right trace takes the place of the group."""
    trace = first.trace()
    return None if trace is None else SecondRound((), (first.sample(0, trace),))


@gate_function("likeliest_traces", uses_traces=True, when=own_failed, answer_probs=True)
def likeliest_traces(first: FirstRound) -> SecondRound | None:
    """AMPO: where all own samples failed, the last ``gate_samples`` of them give way to as many right traces: those
    after which the policy finds the gold answer most likely. They score 1 or more."""
    ranked = sorted(first.right_traces(), key=lambda i: -first.answer_probs[i])[: first.settings.samples]
    if not ranked:
        return None
    gone = first.own[-len(ranked) :]
    kept = tuple(i for i in range(len(first.group.rollouts)) if i not in gone)
    traces = [first.group.task.demonstrations[i] for i in ranked]
    return SecondRound(kept, tuple(first.sample(i, trace) for i, trace in enumerate(traces)), least=1.0)


@gate_function("hinted_group", uses_hints=True, rounds=None, when=all_failed)
def hinted_group(first: FirstRound) -> SecondRound | None:
    """GHPO: where all samples failed, the group is done again with a hint in the prompt, from level to level until a
    sample does not fail or no level is left."""
    task = first.hint(first.round)
    if task is None:
        return None
    return SecondRound((), tuple(first.sample(i, task=task) for i in range(first.planner.n)))


@gate_function("lowest_hint", uses_hints=True, rounds=None, when=own_failed)
def lowest_hint(first: FirstRound) -> SecondRound | None:
    """Scaf-GRPO: where all own samples failed, ``gate_samples`` more are made with a hint in the prompt, from level to
    level until one is right: it takes the place of the last own sample. The other hinted samples are dropped."""
    unhinted = tuple(i for i in range(len(first.group.rollouts)) if i not in first.hinted)
    right = [i for i in first.hinted if first.solved(first.score(i))]
    if right:
        return SecondRound((*(i for i in unhinted if i != first.own[-1]), right[0]))
    task = first.hint(first.round)
    if task is None:
        return SecondRound(unhinted) if first.hinted else None
    return SecondRound(unhinted, tuple(first.sample(i, task=task) for i in range(first.settings.samples)))


@gate_function("micro_groups", uses_traces=True, rounds=None)
def micro_groups(first: FirstRound) -> SecondRound | None:
    """TRAPO: round r adds ``gate_sizes[r - 1]`` samples. They begin with the share ``gate_shares[r - 1]`` of a right
    trace where the mean score so far is below ``gate_scores[r - 1]``, and are the policy's own otherwise."""
    settings, number = first.settings, first.round - 1
    if number == len(settings.sizes):
        return None
    scores = [score.value for score in first.group.scores]
    trace = first.trace() if sum(scores) / len(scores) < settings.scores[number] else None
    prefix = 0 if trace is None else first.planner.prefix_length(trace, settings.shares[number])
    added = tuple(first.sample(i, trace, prefix) for i in range(settings.sizes[number]))
    return SecondRound(tuple(range(len(scores))), added)
