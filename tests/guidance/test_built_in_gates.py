"""The built-in gates, on groups by hand."""

from dataclasses import replace

import pytest
from builders import make_group
from test_gate import first_round
from test_plan import LONG, SHORT, played

from luffy.errors import DataError
from luffy.guidance.built_in_gates import (
    OwnUnderPlan,
    ShortestHint,
    hinted_group,
    likeliest_traces,
    lowest_hint,
    micro_groups,
    own_under_plan,
    shortest_hint,
    trace_alone,
)
from luffy.guidance.gate import GateSettings, SecondRound, SecondRounds
from luffy.guidance.plan import given
from luffy.guidance.row_hints import hints_of
from luffy.types import Author, Demonstration, Problem


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


def test_a_hint_of_several_turns_ends_behind_a_whole_one():
    """Of a first turn that is longer, it is a part."""
    talk, shown = Demonstration(tuple(range(10, 20)), replies=((3, 4), (6, 7))), []
    first = hinting(first_round([0.0] * 2, (talk,), (1.0,)))
    first = replace(first, with_hint=lambda text, level: shown.append((text, level)))
    first.hint(1), first.hint(2), first.hint(3)
    assert shown == [("2", 1), ("3", 2), ("6", 3)]


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


def searching(scores, samples=1, parts=8, fits=100, traces=(LONG,), n_prefix=0):
    """A first round whose hints are a 9 and their length in the prompt; those of more than ``fits`` ids do not fit."""
    first = first_round(scores, traces, (1.0,) * len(traces), n_prefix)
    shown = []

    def with_hint(text, level):
        shown.append(text)
        task, fit = first.group.task, len(text.split()) <= fits
        given = {"hint": level, "hint_text": text, "plain_ids": task.prompt_ids}
        return replace(task, prompt_ids=(9, level, *task.prompt_ids), **given) if fit else None

    settings = ShortestHint(samples=samples, parts=parts)
    said = replace(first, settings=settings, with_hint=with_hint, text_of=lambda ids: " ".join(map(str, ids)))
    return said, shown


@pytest.mark.parametrize("needed", range(1, 10))
def test_shortest_hint_searches_by_halves(needed):
    """Eight lengths; from ``needed`` on the policy is right, with nine never."""
    first, shown = searching([0.0] * 4)
    tried, low, high = [], 1, 8
    while low <= high:
        tried.append((low + high) // 2)
        low, high = (low, tried[-1] - 1) if tried[-1] >= needed else (tried[-1] + 1, high)
    *_, group = play(shortest_hint, first, *[[float(level >= needed)] for level in tried])
    assert [len(text.split()) for text in shown] == [max(10 * level // 8, 1) for level in tried] and len(tried) <= 4
    assert hints(group) == [0] * 3 + [needed % 9] and values(group) == [0.0] * 3 + [float(needed < 9)]
    kept, last = group.rollouts[:3], group.rollouts[3]
    assert kept == first.group.rollouts[:3] and last.task.prompt_ids == first.group.task.prompt_ids
    if needed == 9:
        assert last is first.group.rollouts[3]
        return
    assert last.authors.tolist() == [Author.REPLAY] * 3 and last.task.plain_ids is None and last.finish == "length"
    assert last.behavior_log_probs.tolist() == [-0.5] * 3 and not last.is_own and last.prefix_ratio == 1.0


def test_shortest_hint_counts_turns_and_shows_what_the_teacher_wrote():
    talk = Demonstration(tuple(range(10, 22)), replies=((3, 5), (7, 8), (10, 12)))
    first, shown = searching([0.0] * 2, traces=(talk,))
    play(shortest_hint, first, [0.0], [0.0])
    assert shown == ["10 11 12\n15 16", "10 11 12\n15 16\n18 19"]


def test_shortest_hint_keeps_all_that_were_right_with_it_and_traces():
    first, _ = searching([0.0] * 4, samples=3)
    *_, group = play(shortest_hint, first, [1.0, 0.0, 1.0], [0.0] * 3, [0.0] * 3)
    assert hints(group) == [0, 0, 4, 4] and values(group) == [0.0, 0.0, 1.0, 1.0]
    first, _ = searching([1.0, 0.0], samples=3, n_prefix=1)
    *_, group = play(shortest_hint, first, [1.0] * 3, [1.0] * 3, [1.0] * 3)
    assert hints(group) == [0, 1] and group.rollouts[0].finish == "trace"


def test_shortest_hint_takes_what_fits_and_rows_hints():
    first, shown = searching([0.0] * 2, fits=4)
    *_, group = play(shortest_hint, first, [0.0], [1.0])
    assert [len(text.split()) for text in shown] == [5, 2, 6, 3] and hints(group) == [0, 3]
    assert play(shortest_hint, searching([0.0] * 2, fits=0)[0]) == []
    assert play(shortest_hint, searching([0.0, 1.0])[0]) == [] == play(shortest_hint, searching([0.0], traces=())[0])
    task = first.group.task
    given = replace(task, problem=replace(task.problem, meta={"hints": ["think", "add", "carry"]}), demonstrations=())
    first, shown = replace(first, group=replace(first.group, task=given)), []
    play(shortest_hint, replace(first, with_hint=lambda text, level: shown.append((text, level))))
    assert shown == [("add", 2), ("think", 1)]


def planning(scores, samples=1, fraction=1.0, recalled=None, **more):
    first, shown = searching(scores, **more)
    return replace(first, settings=OwnUnderPlan(samples=samples, fraction=fraction), recalled=recalled), shown


def test_own_under_plan_takes_what_the_policy_did_with_a_trace_as_a_plan():
    first, shown = planning([0.0] * 3, samples=2, fraction=0.5)
    *_, group = play(own_under_plan, first, [0.0, 1.0])
    assert [len(text.split()) for text in shown] == [5] and values(group) == [0.0, 0.0, 1.0]
    assert group.rollouts[:2] == first.group.rollouts[:2] and hints(group) == [0, 0, 1]
    assert group.rollouts[2].authors.tolist() == [Author.REPLAY] * 3
    assert group.rollouts[2].task.prompt_ids == first.group.task.prompt_ids


def test_a_hint_is_dropped_once():
    """A custom gate may keep in a later round what it kept without its hint in an earlier one."""
    first, _ = planning([0.0] * 3)
    *_, group = play(own_under_plan, first, [1.0])
    assert hints(group) == [0, 0, 1]
    (again,) = SecondRounds({0: SecondRound((1, 2), drop_hints=True)}).merge([group], [])
    assert again.rollouts == group.rollouts[1:]


def test_own_under_plan_falls_back_to_the_trace():
    for fits, rounds in ((100, ([0.0], [1.0])), (0, ([1.0],))):  # the plan does not help; or does not fit
        *_, group = play(own_under_plan, planning([0.0] * 3, fits=fits)[0], *rounds)
        assert [r.finish for r in group.rollouts] == ["length"] * 2 + ["trace"] and values(group) == [0.0, 0.0, 1.0]
    assert play(own_under_plan, planning([0.0] * 2, traces=())[0]) == []
    task = (first := planning([0.0] * 2, traces=())[0]).group.task
    given_by_row = replace(task, problem=replace(task.problem, meta={"hints": ["think"]}))
    *_, group = play(own_under_plan, replace(first, group=replace(first.group, task=given_by_row)), [0.0])
    assert group.rollouts == first.group.rollouts  # the row's plan does not help, and there is no trace


def test_own_under_plan_prefers_what_the_policy_did_before():
    first, shown = planning([0.0] * 3)
    before = given(first.group.task, SHORT, author=Author.REPLAY)
    *_, group = play(own_under_plan, replace(first, recalled=before), [1.0])
    assert group.rollouts[2] is before and shown == [] and values(group) == [0.0, 0.0, 1.0]
    assert play(own_under_plan, planning([0.0, 1.0, 0.0], recalled=before)[0]) == []


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
