"""The built-in gates, on groups by hand."""

from dataclasses import replace

import pytest
from builders import make_group
from test_gate import first_round
from test_plan import LONG, SHORT, played

from luffy.errors import DataError
from luffy.guidance.built_in_gates import hinted_group, likeliest_traces, lowest_hint, micro_groups, trace_alone
from luffy.guidance.gate import GateSettings, SecondRounds
from luffy.guidance.row_hints import hints_of
from luffy.types import Demonstration, Problem


def hinting(first, **settings):
    """A first round whose hints are three ids before the prompt, as many as the level says; four do not fit."""

    def with_hint(text, level):
        task = first.group.task
        return replace(task, prompt_ids=(9,) * level + task.prompt_ids, hint=level) if level < 4 else None

    chosen = {"fractions": (0.25, 0.5, 0.75), **settings}
    return replace(first, settings=GateSettings(**chosen), with_hint=with_hint, text_of=lambda ids: str(len(ids)))


def play(gate, first, *scores):
    """The group after each round; ``scores`` are those of the samples that each round adds."""
    groups, rest = [], list(scores)
    while gate.may_go_on(len(groups)):
        second = SecondRounds.of(gate, {0: first})
        if not second.rounds:
            break
        made = played(second.plan, 3)
        added = [make_group(rest.pop(0), g, g[0].task) for g in made]
        (group,) = second.merge([first.group], added)
        groups.append(group)
        if not second.unfinished:
            break
        first = replace(first, group=group, round=first.round + 1)
    assert not rest, "fewer rounds than expected"
    return groups


def values(group):
    return [score.value for score in group.scores]


def hints(group):
    return [rollout.task.hint for rollout in group.rollouts]


@pytest.mark.parametrize(("right", "most", "replaced"), [(0, 0, True), (1, 0, False), (2, 2, True), (3, 2, False)])
def test_trace_alone_drops_the_own_samples_of_a_hard_problem(right, most, replaced):
    first = first_round([1.0] * right + [0.0] * (8 - right))
    groups = play(trace_alone, replace(first, settings=GateSettings(solved=most)), *[[1.0]] * replaced)
    assert len(groups) == replaced
    for group in groups:
        (trace,) = group.rollouts
        assert trace.finish == "trace" and trace.token_ids.tolist() == list(SHORT.token_ids)  # the right one


def test_trace_alone_keeps_the_group_where_no_trace_is_right():
    assert play(trace_alone, first_round([0.0] * 4, trace_scores=(0.0, 0.0))) == []


def test_likeliest_traces_are_ranked_by_the_probability_of_the_answer_and_score_one():
    traces = tuple(Demonstration((40 + i, 21, 1)) for i in range(4))
    first = first_round([0.0] * 8, traces, (1.0, 1.0, 0.0, 1.0))
    first = replace(first, settings=GateSettings(samples=2), answer_probs=(0.2, 0.3, 0.9, 0.7))
    (group,) = play(likeliest_traces, first, [0.5, 1.5])
    assert group.rollouts[:6] == first.group.rollouts[:6]
    assert [r.token_ids[0].item() for r in group.rollouts[6:]] == [43, 41]  # the third is likelier, but wrong
    assert values(group) == [0.0] * 6 + [1.0, 1.5]
    (group,) = play(likeliest_traces, replace(first, score_traces=lambda: (0.0, 1.0, 0.0, 0.0)), [1.0])
    assert [r.finish for r in group.rollouts] == ["length"] * 7 + ["trace"]
    assert play(likeliest_traces, first_round([0.0, 1.0], traces, (1.0,) * 4)) == []


def test_hinted_group_does_all_samples_again_until_one_does_not_fail():
    first = hinting(first_round([0.0] * 8))
    groups = play(hinted_group, first, [0.0] * 8, [0.0, 1.0] + [0.0] * 6)
    assert [hints(group) for group in groups] == [[1] * 8, [2] * 8]
    assert groups[1].rollouts[0].task.prompt_ids == (9, 9, 5, 6)
    assert [hints(g)[0] for g in play(hinted_group, first, *[[0.0] * 8] * 3)] == [1, 2, 3]  # there is no fourth level
    assert play(hinted_group, hinting(first_round([0.0] * 7 + [1.0]))) == []
    assert play(hinted_group, hinting(first_round([0.0] * 8, trace_scores=(0.0, 0.0)))) == []


def test_hints_come_from_the_row_or_are_the_beginning_of_a_right_trace():
    shown = []
    first = replace(
        hinting(first_round([0.0] * 2, (LONG,), (1.0,))), with_hint=lambda text, level: shown.append((text, level))
    )
    first.hint(1), first.hint(3), first.hint(4)
    assert shown == [("2", 1), ("7", 3)]  # int(0.25 * 10), int(0.75 * 10) tokens
    task = first.group.task
    given = replace(task, problem=replace(task.problem, meta={"hints": ["think", "add"]}), demonstrations=())
    first = replace(first, group=replace(first.group, task=given))
    first.hint(1), first.hint(2), first.hint(3)
    assert shown[2:] == [("think", 1), ("add", 2)]


@pytest.mark.parametrize("hints", [["a", 3], [""], {"a": "b"}, 7])
def test_hints_of_a_row_are_texts(hints):
    with pytest.raises(DataError, match="problem 'p': column 'hints': expected a list of texts"):
        hints_of(Problem("p", "?", "1", meta={"hints": hints}))


def test_lowest_hint_replaces_one_own_sample_by_the_first_right_one():
    first = hinting(first_round([0.0] * 8), samples=2)
    *_, group = play(lowest_hint, first, [0.0, 0.0], [0.0, 1.0])
    assert hints(group) == [0] * 7 + [2] and values(group) == [0.0] * 7 + [1.0]
    assert group.rollouts[:7] == first.group.rollouts[:7]
    *_, group = play(lowest_hint, first, *[[0.0, 0.0]] * 3)
    assert group.rollouts == first.group.rollouts  # no level helped: the own samples stay
    assert play(lowest_hint, hinting(first_round([0.0] * 7 + [0.5]))) == []


def test_lowest_hint_keeps_the_traces_of_a_group():
    first = hinting(first_round([1.0, 0.0, 0.0], n_prefix=1), samples=2)
    *_, group = play(lowest_hint, first, [0.0, 1.0])
    assert group.rollouts[:2] == first.group.rollouts[:2] and not group.rollouts[0].is_on_policy
    assert hints(group) == [0, 0, 1] and values(group) == [1.0, 0.0, 1.0]
    *_, group = play(lowest_hint, first, *[[0.0, 0.0]] * 3)
    assert group.rollouts == first.group.rollouts


TRAPO = {"sizes": (2, 1, 1), "fractions": (0.25, 0.5, 1.0), "scores": (0.5, 2 / 3, 1.0)}


@pytest.mark.parametrize(
    ("own", "added", "prefixes"),
    [
        ([0.0] * 4, [[0.0, 0.0], [0.0], [1.0]], [2, 2, 5, 10]),
        ([1.0, 0.0, 0.0, 0.0], [[1.0, 0.0], [1.0], [1.0]], [2, 2, 5, 10]),  # 1/4, 2/6, 3/7
        ([1.0, 1.0, 0.0, 0.0], [[1.0, 1.0], [1.0], [1.0]], [0, 0, 0, 10]),  # 2/4, 4/6, 5/7
        ([1.0] * 4, [[1.0, 1.0], [1.0], [1.0]], [0, 0, 0, 0]),
        ([1.0, 1.0, 0.0, 0.0], [[0.0, 0.0], [1.0], [0.0]], [0, 0, 5, 10]),  # 2/4, 2/6, 3/7
    ],
)
def test_micro_groups_begin_with_more_of_a_trace_the_less_was_solved(own, added, prefixes):
    first = first_round(own, (LONG,), (1.0,))
    *_, group = play(micro_groups, replace(first, settings=GateSettings(**TRAPO)), *added)
    assert [int(r.off_policy.sum()) for r in group.rollouts] == [0] * 4 + prefixes
    assert values(group) == [*own, *(score for part in added for score in part)]


def test_micro_groups_without_a_right_trace_are_all_own():
    first = first_round([0.0] * 4, (LONG,), (0.0,))
    *_, group = play(micro_groups, replace(first, settings=GateSettings(**TRAPO)), [0.0, 0.0], [0.0], [0.0])
    assert all(rollout.is_own for rollout in group.rollouts) and len(group.rollouts) == 8


def test_every_round_draws_its_own_seeds():
    first = first_round([0.0] * 4, (LONG,), (1.0,))
    seeds = {replace(first, round=r, **place).sample(n).request.seed
             for r in (1, 2, 3) for n in (0, 1) for place in ({}, {"position": 6}, {"step": 4})}  # fmt: skip
    assert len(seeds) == 18
