import pytest
import torch

from luffy.core.reduce import Counts, counted_tokens, token_weights

MASKS = [torch.tensor([True, True, False]), torch.tensor([True]), torch.tensor([False, False])]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token-mean", [1 / 3, 1 / 3]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2]),
        ("seq-mean-token-mean", [1 / 4, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20]),
    ],
)
def test_weights_by_hand(reduction, expected):
    first, second, empty = token_weights(MASKS, reduction, max_response_tokens=10)
    torch.testing.assert_close(first, torch.tensor([expected[0], expected[0], 0.0]))
    torch.testing.assert_close(second, torch.tensor([expected[1]]))
    torch.testing.assert_close(empty, torch.zeros(2))


def test_no_token_at_all_weighs_nothing():
    (weights,) = token_weights([torch.tensor([False, False])], "token-mean", 10)
    assert weights.tolist() == [0.0, 0.0]


def test_unknown_reduction():
    with pytest.raises(ValueError, match="token-mean, seq-mean-token-sum"):
        token_weights(MASKS, "mean", 10)


def test_a_weight_scales_its_token_and_counts_as_one():
    first, second = token_weights([torch.tensor([0.5, 0.0, -2.0]), torch.tensor([1.0])], "token-mean", 10)
    assert first.tolist() == pytest.approx([0.5 / 3, 0.0, -2 / 3]) and second.tolist() == pytest.approx([1 / 3])


def test_tokens_are_counted_over_all_sequences_at_once():
    nothing = torch.zeros(0)
    assert counted_tokens([*MASKS, torch.tensor([0.5, 0.0, -2.0]), nothing, torch.ones(1)]) == [2, 1, 0, 2, 0, 1]
    assert counted_tokens([]) == [] and token_weights([], "token-mean", 10) == []
    assert Counts.of(MASKS) == (3, 2)
