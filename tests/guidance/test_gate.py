"""A second round for problems whose first responses ask for it."""

from dataclasses import replace

import pytest
import torch
from builders import make_group
from test_plan import LONG, SHORT, planner, played, requests_of, task

from luffy.errors import UserError
from luffy.guidance.built_in_gates import trace_on_failure
from luffy.guidance.gate import FirstRound, Gate, SecondRound, SecondRounds, find_gate, gate_function
from luffy.types import Group, Score


def first_round(scores, traces=(LONG, SHORT), trace_scores=(0.0, 1.0), n_prefix=0, **settings):
    made = planner(n=len(scores), n_prefix=n_prefix, **settings)
    plan = made.plan([task(demonstrations=traces)], 3, [0])
    (rollouts,) = played(plan, 3)
    group = make_group(scores, rollouts, rollouts[0].task)
    return FirstRound(group, 3, 0, 5, made, lambda s: s >= 1, lambda s: s <= 0, lambda: trace_scores)


def second(gate, first):
    """Groups after the second round; added samples score 1."""
    rounds = SecondRounds.of(gate, {0: first})
    added = [make_group([1.0] * len(group), group, group[0].task) for group in played(rounds.plan, 3)]
    (merged,) = rounds.merge([first.group], added)
    return merged


def test_a_verified_trace_replaces_a_sample_where_all_failed():
    first = first_round([0.0] * 4)
    group = second(trace_on_failure, first)
    assert len(group.rollouts) == 4 and group.rollouts[:3] == first.group.rollouts[:3]
    assert group.rollouts[3].finish == "trace" and group.rollouts[3].token_ids.tolist() == list(SHORT.token_ids)
    assert [s.value for s in group.scores] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("scores", "changes"),
    [
        ([0.0, 1.0, 0.0, 0.0], {}),  # one is right
        ([0.0, 0.5, 0.0, 0.0], {}),  # one is neither right nor wrong
        ([0.0] * 4, {"trace_scores": (0.0, 0.0)}),  # no trace is right
        ([0.0] * 4, {"traces": (), "trace_scores": ()}),
        ([1.0, 0.0, 0.0, 0.0], {"n_prefix": 1}),  # the group has a right trace
    ],
)
def test_otherwise_the_group_stays(scores, changes):
    first = first_round(scores, **changes)
    assert trace_on_failure(first) is None and second(trace_on_failure, first) is first.group


def test_a_wrong_trace_in_the_group_stays_and_an_own_sample_goes():
    first = first_round([0.0] * 4, n_prefix=1)
    assert trace_on_failure(first).keep == (0, 1, 2) and first.own == [1, 2, 3]


def test_the_decision_depends_on_seed_step_and_problem_alone():
    traces = tuple(replace(SHORT, token_ids=(i, 21, 1)) for i in range(30, 60))

    def chosen(**changes):
        first = replace(first_round([0.0] * 2, traces, (1.0,) * 30, choice="random"), **changes)
        return trace_on_failure(first).add[0].trace

    assert chosen() == chosen()
    assert len({chosen(step=step).token_ids for step in range(8)}) > 2
    assert chosen(step=4) != chosen(position=9)


def longer_prefix(first):
    return SecondRound((), tuple(first.sample(i, LONG, 6) for i in range(2)))


def hint(first):
    hinted = replace(first.group.task, prompt_ids=(9, *first.group.task.prompt_ids), hint=1)
    return SecondRound((0,), (first.sample(0, task=hinted), first.sample(1, task=hinted)))


def trace_alone(first):
    return SecondRound((0,))


def test_a_gate_may_redo_the_group_hint_in_the_prompt_or_keep_the_trace_alone():
    first = first_round([0.0] * 4, n_prefix=1)
    redone = second(Gate(longer_prefix), first)
    assert [r.off_policy.sum().item() for r in redone.rollouts] == [6, 6] and redone.rollouts[0].prefix_ratio == 0.6
    assert torch.equal(redone.rollouts[0].token_ids[:6], torch.tensor(LONG.token_ids[:6]))
    hinted = second(Gate(hint), first)
    assert [r.task.prompt_ids for r in hinted.rollouts] == [(5, 6), (9, 5, 6), (9, 5, 6)]
    requests = requests_of(SecondRounds.of(Gate(hint), {0: first}).plan)
    assert requests[0].prompt_ids == (9, 5, 6) and requests[0].seed != requests[1].seed
    assert second(Gate(trace_alone), first).rollouts == first.group.rollouts[:1]
    with pytest.raises(UserError, match="no sample of problem 'p' is left"):
        second(Gate(lambda first: SecondRound(())), first)


def test_a_score_raised_to_the_least_keeps_why_it_was_low():
    first = first_round([0.0] * 2)
    rounds = SecondRounds.of(Gate(lambda first: SecondRound((0,), (first.sample(1),), least=0.5)), {0: first})
    rollouts = played(rounds.plan, 3)[0]
    for value, raised in ((0.0, 0.5), (0.75, 0.75)):
        added = Group(first.group.task, rollouts, (Score(value, "timeout", "took 5 s"),))
        (kept, new) = rounds.merge([first.group], [added])[0].scores
        assert kept.value == 0.0 and (new.value, new.status, new.reason) == (raised, "timeout", "took 5 s")


def test_gates_are_found_by_name_or_path():
    assert find_gate("none") is None and find_gate("trace_on_failure") is trace_on_failure
    assert find_gate(f"{__name__}:hint").function is hint
    assert gate_function("test_hint")(hint) is find_gate("test_hint")
    with pytest.raises(UserError, match=r"'guidance\.gate': unknown gate 'x'; known: none, trace_on_failure"):
        find_gate("x")
