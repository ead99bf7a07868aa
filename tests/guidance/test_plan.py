from dataclasses import replace

import pytest
import torch
from builders import make_task

from luffy.guidance.plan import Planner, extended
from luffy.guidance.ratios import RatioSchedule
from luffy.guidance.trace_choice import choose
from luffy.seeds import seed_of
from luffy.types import Completion, Demonstration, Sampling

LONG = Demonstration((10, 11, 12, 13, 14, 15, 16, 17, 18, 1), log_probs=tuple(-0.1 * i for i in range(10)))
SHORT = Demonstration((20, 21, 1))


def task(name="p", demonstrations=(LONG,)):
    return make_task(traces=demonstrations, id=name)


def planner(n=4, n_prefix=1, ratio=1.0, choice="shortest", seed=0, strategy="fixed"):
    schedule = RatioSchedule(strategy, ratio, ratio, 10)
    return Planner(n, n_prefix, Sampling(max_tokens=20, eos_ids=(1,)), schedule, choice, seed)


def requests_of(plan):
    return [p.request for group in plan for p in group if p.request is not None]


def completion(length=3):
    return Completion(torch.full((length,), 7), torch.full((length,), -0.5), "length")


def played(plan, version=0, more=None):
    """The plan with the same completion behind every unfinished episode."""
    more = more or completion()
    return [tuple(p if p.finish else extended(p, more, version) for p in group) for group in plan]


def test_n_is_the_total_and_a_whole_trace_never_reaches_the_engine():
    plan = planner().plan([task()], 0, [0])
    assert len(plan[0]) == 4 and len(requests_of(plan)) == 3
    (rollouts,) = played(plan, 9)
    trace, own = rollouts[0], rollouts[1]
    assert trace.token_ids.tolist() == list(LONG.token_ids) and trace.off_policy.all() and trace.finish == "trace"
    torch.testing.assert_close(trace.behavior_log_probs, torch.tensor(LONG.log_probs))
    assert own.is_on_policy and own.token_ids.tolist() == [7, 7, 7] and own.policy_version == 9


def test_a_partial_prefix_is_continued_within_the_response_budget():
    plan = planner(ratio=0.55).plan([task()], 0, [0])
    request = requests_of(plan)[0]
    assert request.prefix_ids == LONG.token_ids[:5]  # int(0.55 * 10)
    assert request.sampling.max_tokens == 15 and requests_of(plan)[1].sampling.max_tokens == 20
    (rollouts,) = played(plan)
    assert rollouts[0].off_policy.tolist() == [True] * 5 + [False] * 3
    assert rollouts[0].behavior_log_probs.tolist() == pytest.approx([0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.5, -0.5])
    assert rollouts[0].prefix_ratio == 0.5 and rollouts[1].prefix_ratio == 0.0


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_streams_keep_their_types_whatever_a_trace_was_recorded_with(ratio):
    whole_numbers = Demonstration((10, 11, 12, 1), log_probs=(-1, -2, -3, 0))
    plan = planner(n=2, ratio=ratio).plan([task(demonstrations=[whole_numbers])], 0, [0])
    for rollout in played(plan)[0]:
        assert rollout.token_ids.dtype == torch.int64
        assert rollout.behavior_log_probs.dtype == rollout.engine_log_probs.dtype == torch.float32


def test_what_the_guidance_model_thought_of_a_prefix_is_not_known():
    plan = planner(n=1, ratio=0.5).plan([task()], 0, [0])
    answer = Completion(torch.full((2,), 7), torch.zeros(2), "stop", guidance_log_probs=torch.tensor([-1.0, -2.0]))
    ((rollout,),) = played(plan, more=answer)
    assert rollout.guidance_log_probs.isnan().tolist() == [True] * 5 + [False] * 2
    assert rollout.guidance_log_probs[5:].tolist() == [-1.0, -2.0]


def test_every_task_has_its_visit_and_its_place():
    for visits, places in (([0], [0, 1]), ([0, 0], [0])):
        with pytest.raises(ValueError, match="zip"):
            planner().plan([task("a"), task("b")], 0, visits, positions=places)


def test_a_prefix_of_no_token_is_an_on_policy_sample():
    plan = planner(ratio=0.05).plan([task()], 0, [0])
    (rollouts,) = played(plan)
    assert len(requests_of(plan)) == 4 and all(r.is_on_policy for r in rollouts)


def test_a_task_without_traces_is_plain_on_policy():
    with_trace, without = task("a"), task("b", ())
    plan = planner(n_prefix=2).plan([with_trace, without], 3, [0, 0])
    assert [p.request is None for p in plan[0]] == [True, True, False, False]
    assert all(p.request is not None and p.prefix == 0 for p in plan[1])


def test_unrecorded_teacher_tokens_have_probability_one():
    plan = planner().plan([task(demonstrations=[SHORT])], 0, [0])
    assert played(plan)[0][0].behavior_log_probs.tolist() == [0.0, 0.0, 0.0]


def test_seeds_differ_by_sample_step_position_and_seed_and_nothing_else():
    seeds = lambda step=0, first=0, seed=0: [  # noqa: E731
        r.seed
        for r in requests_of(planner(seed=seed).plan([task("a")] * 2, step, [0, 0], positions=[first, first + 1]))
    ]
    assert len(set(seeds())) == 6
    assert seeds() == seeds() and not set(seeds()) & (set(seeds(step=1)) | set(seeds(first=2)) | set(seeds(seed=1)))
    # the second half of a batch planned by itself, as another rank would
    alone = requests_of(planner().plan([task("a")], 0, [0], positions=[1]))
    assert [r.seed for r in alone] == seeds()[3:]
    assert 0 <= seed_of("x") < 2**63


def trace_numbers(demonstrations):
    return [len(d.token_ids) for d in demonstrations]


def test_choices():
    three = [Demonstration((1,) * n) for n in (5, 2, 9)]
    pick = lambda how, count=1, visit=0, key="k", rewards=None: trace_numbers(  # noqa: E731
        choose(three, count, how, visit=visit, key=key, rewards=rewards)
    )
    assert pick("shortest", 2) == [2, 5] and pick("shortest", 4) == [2, 5, 9, 2]
    assert [pick("round_robin", visit=v) for v in range(4)] == [[5], [2], [9], [5]]
    assert pick("round_robin", 2, visit=1) == [9, 5]
    assert pick("best_reward", 2, rewards=[0.0, 1.0, 1.0]) == [2, 9]
    assert pick("random") == pick("random") and sorted(pick("random", 3)) == [2, 5, 9]
    assert {pick("random", key=str(k))[0] for k in range(40)} == {2, 5, 9}


@pytest.mark.parametrize(
    ("ratio", "length"), [(0.05, 0), (0.2, 0), (0.3, 3), (0.59, 3), (0.6, 6), (0.99, 6), (1.0, 10)]
)
def test_a_part_of_a_trace_ends_at_a_boundary(ratio, length):
    cut = replace(planner(ratio=ratio), ends_prefix=lambda token: token in (12, 15))
    assert cut.prefix_length(LONG, ratio) == length
    first = cut.plan([task()], 0, [0])[0][0]
    assert first.prefix == length and (first.request is None) is (length == 10)
