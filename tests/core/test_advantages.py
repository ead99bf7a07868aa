import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import luffy
from luffy.core.advantages import compute_grpo_outcome_advantage_split, group_advantages


def rewards(scores, width=3):
    """The score on the last token, as an outcome reward comes."""
    out = torch.zeros(len(scores), width, dtype=torch.float64)
    out[:, -1] = torch.tensor(scores, dtype=torch.float64)
    return out


def test_hand_computed_split():
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.float64)
    on = torch.tensor([False, True, True, True])
    advantages, returns = compute_grpo_outcome_advantage_split(rewards([1.0, 0.0, 1.0, 0.0]), mask, ["a"] * 4, on)
    std = math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2)  # of 0, 1, 0: unbiased
    up, down = (2 / 3) / (std + 1e-6), (-1 / 3) / (std + 1e-6)
    expected = torch.tensor([[up] * 3, [down] * 3, [up, up, 0.0], [down] * 3], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(returns, advantages, rtol=0, atol=0)


def test_scores_are_summed_over_time_and_without_std_only_centred():
    token_rewards = torch.tensor([[0.5, 0.25], [0.0, 0.25]])
    advantages, _ = compute_grpo_outcome_advantage_split(
        token_rewards, torch.ones(2, 2), [0, 0], torch.tensor([True, True]), use_std=False
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.25, 0.25], [-0.25, -0.25]]))


def test_one_on_policy_sample_has_mean_zero_and_std_one():
    advantages, _ = compute_grpo_outcome_advantage_split(
        rewards([1.0, 0.5]), torch.ones(2, 3), ["x", "x"], torch.tensor([False, True])
    )
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.0, 0.5], dtype=torch.float64) / (1 + 1e-6))


def test_equal_rewards_give_zero_not_nan():
    advantages, _ = compute_grpo_outcome_advantage_split(
        rewards([1.0, 1.0, 1.0]), torch.ones(3, 3), [7, 7, 7], torch.tensor([True, True, True])
    )
    assert (advantages == 0).all()


@pytest.mark.parametrize("value", [0.1, 0.3, 1.1, 10.1, -0.7, 1e-3, 1e6 + 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("use_std", [True, False])
def test_equal_rewards_that_are_not_exact_in_binary_give_exactly_zero(value, dtype, use_std):
    """The rounding of the mean, over the spread that the same rounding makes, would be an advantage of up to 0.9."""
    for size in range(2, 33):
        scores = torch.full((size,), value, dtype=dtype)
        everyone = torch.ones(size, dtype=torch.bool)
        assert (group_advantages(scores, "g" * size, everyone, use_std=use_std) == 0).all(), size


def test_a_trace_beside_equal_rewards_is_as_good_as_its_distance():
    scores = torch.tensor([1.0] + [0.1] * 7, dtype=torch.float64)
    on = torch.tensor([False] + [True] * 7)
    advantages = group_advantages(scores, "g" * 8, on, use_std=True)
    assert advantages[0].item() == pytest.approx(0.9 / (1 + 1e-6), rel=1e-12)
    assert (advantages[1:] == 0).all()


@pytest.mark.parametrize("keys", [["a"], [], ["a", "a", "b"], torch.tensor([1, 1, 2])])
def test_one_group_key_a_row(keys):
    with pytest.raises(ValueError, match=rf"2 rows.*{len(keys)} group keys"):
        compute_grpo_outcome_advantage_split(rewards([1.0, 0.0]), torch.ones(2, 3), keys, torch.tensor([True, True]))


@pytest.mark.parametrize("rows", [1, 3])
def test_one_on_policy_flag_a_row(rows):
    on = torch.ones(rows, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"2 rows.*{rows} on-policy"):
        compute_grpo_outcome_advantage_split(rewards([1.0, 0.0]), torch.ones(2, 3), ["a", "a"], on)


def test_a_group_without_on_policy_sample_is_named():
    with pytest.raises(ValueError, match="'lonely'"):
        compute_grpo_outcome_advantage_split(
            rewards([1.0, 0.0]), torch.ones(2, 3), ["lonely", "other"], torch.tensor([False, True])
        )


def test_any_hashable_and_a_tensor_index_group_alike():
    scores, mask, on = rewards([1.0, 0.0, 0.0, 1.0]), torch.ones(4, 3), torch.ones(4, dtype=torch.bool)
    expected, _ = compute_grpo_outcome_advantage_split(scores, mask, [0, 0, 1, 1], on)
    for index in (["p", "p", ("q", 1), ("q", 1)], torch.tensor([5, 5, 3, 3])):
        advantages, _ = compute_grpo_outcome_advantage_split(scores, mask, index, on)
        torch.testing.assert_close(advantages, expected, rtol=0, atol=0)


def test_grpo_takes_its_baseline_from_all_samples():
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0])
    everyone = torch.ones(4, dtype=torch.bool)
    torch.testing.assert_close(
        group_advantages(scores, "aaaa", everyone, use_std=False), torch.tensor([0.75, -0.25, -0.25, -0.25])
    )


@pytest.mark.parametrize("use_std", [True, False])
def test_many_groups_at_once_have_the_bits_of_each_alone(use_std):
    scores = torch.rand(40, 8, generator=torch.Generator().manual_seed(0))
    scores[3], scores[7] = 0.1, scores[7].round()
    everyone = torch.ones(8, dtype=torch.bool)
    alone = [group_advantages(group, "g" * 8, everyone, use_std=use_std) for group in scores]
    together = group_advantages(scores.T.flatten(), list(range(40)) * 8, everyone.repeat(40), use_std=use_std)
    assert torch.equal(together.view(8, 40).T, torch.stack(alone)) and not alone[3].any()


def test_importable_from_the_root():
    assert luffy.compute_grpo_outcome_advantage_split is compute_grpo_outcome_advantage_split


groups = st.lists(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=2, max_size=5).filter(
        lambda g: any(on for _, on in g)
    ),
    min_size=1,
    max_size=4,
)


@given(groups, st.randoms(use_true_random=False), st.booleans())
def test_permuting_samples_permutes_advantages(group_list, rng, use_std):
    rows = [(s, on, key) for key, g in enumerate(group_list) for s, on in g]
    order = list(range(len(rows)))
    rng.shuffle(order)

    def run(rows):
        scores, on, index = zip(*rows, strict=True)
        out, _ = compute_grpo_outcome_advantage_split(
            rewards(scores), torch.ones(len(rows), 3), index, torch.tensor(on), use_std=use_std
        )
        return out

    torch.testing.assert_close(run([rows[i] for i in order]), run(rows)[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_has_the_same_bits_alone_and_among_others(dtype):
    generator = torch.Generator().manual_seed(0)
    for n in (*range(2, 20), 64, 257):
        scores = torch.rand(5, n, generator=generator, dtype=dtype)
        among = group_advantages(
            scores.flatten(), [g for g in range(5) for _ in range(n)], torch.ones(5 * n), use_std=True
        )
        for row, found in zip(scores, among.view(5, n), strict=True):
            torch.testing.assert_close(found, (row - row.mean()) / (row.std() + 1e-6))
            assert torch.equal(found, group_advantages(row, [0] * n, torch.ones(n), use_std=True))


@given(groups, groups)
def test_another_group_changes_nothing(first, second):
    def run(*parts):
        rows = [(s, on, (key, n)) for n, part in enumerate(parts) for key, g in enumerate(part) for s, on in g]
        scores, on, index = zip(*rows, strict=True)
        return compute_grpo_outcome_advantage_split(rewards(scores), torch.ones(len(rows), 3), index, torch.tensor(on))[
            0
        ]

    alone = run(first)
    torch.testing.assert_close(run(first, second)[: len(alone)], alone, rtol=0, atol=0)
