import itertools

from builders import make_task
from hypothesis import given
from hypothesis import strategies as st

from luffy.step.draws import expected_tokens, share_out
from luffy.types import Demonstration


@given(st.lists(st.floats(0, 1000), max_size=40), st.integers(1, 9))
def test_every_index_goes_to_one_rank_and_loads_are_even(costs, ranks):
    shares = share_out(costs, ranks)
    assert len(shares) == ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    # the bound of greedy scheduling: nobody is ahead by more than one job
    assert max(loads) - min(loads) <= max(costs, default=0) + 1e-6


def test_ranks_get_work_before_anyone_gets_more_although_it_costs_nothing():
    assert sorted(map(len, share_out([0.0] * 7, 4))) == [1, 2, 2, 2]


def test_the_dearest_problems_part_ways():
    assert share_out([9, 1, 1, 8, 1, 1], 2) == [[0, 2, 5], [1, 3, 4]]


def test_expected_tokens_take_the_teachers_length():
    def task(*lengths):
        return make_task((1, 2, 3), [Demonstration((7,) * n) for n in lengths])

    assert expected_tokens(task(10, 20), n=4, max_tokens=100) == 3 + 4 * 15
    assert expected_tokens(task(), n=4, max_tokens=100) == 3 + 4 * 50
