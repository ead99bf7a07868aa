import torch
from hypothesis import given
from hypothesis import strategies as st

from luffy.train.packing import cut, pack
from luffy.types import Sample


def sample(prompt, response, *, off=False, sft=False):
    n = len(response)
    flag = torch.full((n,), off)
    in_sft = torch.full((n,), sft)
    return Sample(
        tuple(prompt),
        torch.tensor(response),
        flag,
        ~in_sft,
        in_sft,
        torch.full((n,), 1.5),
        torch.full((n,), -0.5),
        torch.full((n,), -0.5),
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(40, 90))
def test_every_sequence_lands_in_one_bin_within_the_budget(lengths, budget):
    bins = cut(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget for b in bins)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_the_bins_waste_little(lengths):
    """Any two neighbours together exceed the budget: never more than twice the bins that are needed."""
    bins = cut(lengths, 40)
    assert len(bins) <= 2 * -(-sum(lengths) // 40)


def test_an_overlong_sequence_goes_alone():
    assert cut([5, 100, 5], 20) == [[1], [0, 2]]


def test_streams_line_up():
    (batch,) = pack([sample([7, 8], [9, 10, 11]), sample([5], [6, 4], off=True)], 64, "token-mean", 8)
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
    samples = [sample([1, 2], [3, 4, 5]), sample([1], [2]), sample([1, 2, 3], [4, 5], off=True, sft=True)]
    for budget in (5, 7, 100):
        batches = pack(samples, budget, "seq-mean-token-sum-norm", 10)
        weights = torch.cat([b.rl_weights for b in batches])
        assert sorted(weights.tolist()) == [0.0] * 2 + [torch.tensor(1 / 20).item()] * 4  # 2 RL sequences x 10
        assert torch.cat([b.sft_weights for b in batches]).sum().item() == 1.0
