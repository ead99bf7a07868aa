from dataclasses import replace

import torch
from builders import make_sample
from hypothesis import given
from hypothesis import strategies as st

from luffy.learn.packing import computed_tokens, cut, family_of, pack
from luffy.types import Family


def alone(lengths):
    """Samples of these lengths, each with a prompt of its own (of one token)."""
    return [make_sample([100 + i], [1] * (n - 1)) for i, n in enumerate(lengths)]


def samples_of_groups(sizes):
    """Per group the length of its prompt and those of its responses."""
    return [make_sample([100 + g] * prompt, [1] * n) for g, (prompt, responses) in enumerate(sizes) for n in responses]


def flat(bins):
    return [i for bin_ in bins for members in bin_ for i in members]


GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=8)), min_size=1, max_size=6
)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(40, 90))
def test_every_sequence_lands_in_one_bin_within_the_budget(lengths, budget):
    bins = cut(alone(lengths), budget)
    assert sorted(flat(bins)) == list(range(len(lengths)))
    assert all(len(members) == 1 for bin_ in bins for members in bin_)
    assert all(sum(lengths[i] for (i,) in bin_) <= budget for bin_ in bins)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30))
def test_the_bins_waste_little(lengths):
    """Any two neighbours together exceed the budget: never more than twice the bins that are needed."""
    bins = cut(alone(lengths), 40)
    assert len(bins) <= 2 * -(-sum(lengths) // 40)


@given(GROUPS, st.integers(40, 120))
def test_samples_of_a_prompt_stay_together_while_the_budget_allows(sizes, budget):
    samples = samples_of_groups(sizes)
    bins = cut(samples, budget)
    assert sorted(flat(bins)) == list(range(len(samples)))
    for bin_ in bins:
        families = [family_of(samples, members) for members in bin_]
        assert sum(family.tokens for family in families) <= budget
        assert all(len({samples[i].prompt_ids for i in members}) == 1 for members in bin_)
    pieces = [samples[members[0]].prompt_ids for bin_ in bins for members in bin_]
    for g, (prompt, responses) in enumerate(sizes):
        if prompt + sum(responses) <= budget:
            assert pieces.count((100 + g,) * prompt) == 1
    apart = cut(samples, budget, share=False)
    assert all(len(members) == 1 for bin_ in apart for members in bin_)
    assert computed_tokens(samples, bins) <= computed_tokens(samples, apart) == sum(map(len, samples))


def test_an_overlong_sequence_goes_alone():
    assert cut(alone([5, 100, 5]), 20) == [[[1]], [[0], [2]]]


def test_a_group_beyond_the_budget_is_parted_and_each_part_has_the_prompt():
    samples = samples_of_groups([(4, [5, 6, 3]), (2, [1])])
    assert cut(samples, 30) == [[[1, 0, 2], [3]]]
    bins = cut(samples, 15)
    assert bins == [[[1, 0]], [[2], [3]]]
    assert computed_tokens(samples, bins) == (4 + 11) + (4 + 3) + (2 + 1)
    assert cut(samples, 8) == [[[1]], [[0]], [[2]], [[3]]]  # 4 + 6 and 4 + 5 exceed it even alone


def test_a_shared_prompt_lies_there_once():
    samples = [make_sample([7, 8], [9, 10, 11]), make_sample([5], [6, 4]), make_sample([7, 8], [12])]
    (batch,) = pack(samples, 64, "token-mean", 8)
    assert batch.input_ids.tolist() == [7, 8, 9, 10, 11, 12, 5, 6, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 0, 1, 2]
    assert batch.families == (Family(2, (3, 1)), Family(1, (2,))) and batch.order == (0, 2, 1)
    assert batch.response_lengths == (3, 1, 2) and batch.lengths == (5, 3, 3)
    # 9 and 12 are both predicted from the last token of their prompt
    assert batch.predict_from.tolist() == [1, 2, 3, 1, 6, 7]
    assert batch.targets.tolist() == [9, 10, 11, 12, 6, 4]
    (apart,) = pack(samples, 64, "token-mean", 8, share=False)
    assert apart.input_ids.tolist() == [7, 8, 9, 10, 11, 5, 6, 4, 7, 8, 12]
    assert apart.order == (0, 1, 2) and apart.predict_from.tolist() == [1, 2, 3, 5, 6, 9]


def test_streams_line_up():
    (batch,) = pack([make_sample([7, 8], [9, 10, 11]), make_sample([5], [6, 4], prefix=2)], 64, "token-mean", 8)
    assert batch.input_ids.tolist() == [7, 8, 9, 10, 11, 5, 6, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.lengths == (5, 3)
    # a token is predicted from the position before it: 9 from the last prompt token
    assert batch.predict_from.tolist() == [1, 2, 3, 5, 6]
    assert batch.targets.tolist() == [9, 10, 11, 6, 4]
    assert batch.off_policy.tolist() == [False, False, False, True, True]
    torch.testing.assert_close(batch.rl_weights, torch.full((5,), 0.2))
    assert (batch.sft_weights == 0).all() and batch.old_log_probs is None


def test_denominators_count_the_whole_mini_batch_however_it_is_cut():
    samples = [
        make_sample([1, 2], [3, 4, 5]),
        make_sample([1], [2]),
        make_sample([1, 2, 3], [4, 5], prefix=2, sft=True),
    ]
    for budget in (5, 7, 100):
        batches = pack(samples, budget, "seq-mean-token-sum-norm", 10)
        weights = torch.cat([b.rl_weights for b in batches])
        assert sorted(weights.tolist()) == [0.0] * 2 + [torch.tensor(1 / 20).item()] * 4  # 2 RL sequences x 10
        assert torch.cat([b.sft_weights for b in batches]).sum().item() == 1.0


def test_a_token_may_count_in_both_terms_and_without_a_reduction_weights_stay():
    s = make_sample([5], [6, 7])
    both = replace(s, sft_weights=torch.tensor([0.25, 0.0]))
    (batch,) = pack([both], 100, "token-mean", 16)
    assert batch.rl_weights.tolist() == [0.5, 0.5] and batch.sft_weights.tolist() == [0.25, 0.0]
    (batch,) = pack([both, both], 100, None, 16)
    assert batch.rl_weights.tolist() == [1.0] * 4 and batch.sft_weights.tolist() == [0.25, 0.0] * 2


def test_micro_batches_are_the_same_however_they_are_asked_for():
    batches = pack(
        [make_sample([1, 2], [3, 4, 5, 6]), make_sample([3], [4, 5, 6]), make_sample([4, 5, 6], [7])],
        6,
        "token-mean",
        8,
    )
    assert len(batches) == 3 and [b.order for b in batches] == [(0,), (1,), (2,)]
    for one, other in zip(batches, [batches[0], *batches[1:]], strict=True):
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.rl_weights, other.rl_weights)
    assert batches[-1].input_ids.tolist() == [4, 5, 6, 7]
