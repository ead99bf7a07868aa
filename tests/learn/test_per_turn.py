"""Credit turn by turn: returns, baselines among equal turns, and what stays the response's."""

from dataclasses import replace

import pytest
import torch
from builders import make_group, make_rollout

from luffy.config import AlgorithmConfig
from luffy.learn.credit import ScoredGroup, ScoredTokens, find_credit_function, group_baseline
from luffy.learn.estimators.per_turn import PerTurn, returns_of, turn_numbers
from luffy.types import Author, EpisodeOutcome

P, E, T = Author.POLICY, Author.ENVIRONMENT, Author.TEACHER


def an_episode(authors, rewards=()):
    episode = make_rollout(len(authors))
    outcome = EpisodeOutcome("answer", turns=3, turn_rewards=tuple(rewards))
    return replace(episode, authors=torch.tensor(authors, dtype=torch.int8), outcome=outcome)


def credit_of(rollouts, rewards, discount=1.0, **algorithm):
    group = ScoredGroup(make_group(rewards, rollouts), torch.tensor(rewards), [ScoredTokens()] * len(rollouts))
    cfg = AlgorithmConfig(credit={"name": "per_turn", "discount": discount}, **algorithm)
    return find_credit_function(cfg.credit)(group, cfg), group


def test_tokens_know_their_turn():
    assert turn_numbers(torch.tensor([P, P, E, E, P, E, P, P])).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert turn_numbers(torch.tensor([T, E, P])).tolist() == [0, 0, 1]


def test_returns_are_discounted_and_what_is_left_is_the_last_turns():
    episode = an_episode([P, E, P, E, P], rewards=(1.0, 0.0, 2.0))
    assert returns_of(episode, 3.0, 3, 1.0).tolist() == [3.0, 2.0, 2.0]
    assert returns_of(episode, 4.0, 3, 0.5).tolist() == [1.0 + 0.5 * 1.5, 1.5, 3.0], "the verifier gave 1 more"
    assert returns_of(replace(episode, outcome=None), 1.0, 3, 0.5).tolist() == [0.25, 0.5, 1.0]


def test_each_turn_is_compared_with_the_same_turn_of_the_others():
    rollouts = [an_episode([P, E, P, P], (1.0, 0.0)), an_episode([P, E, P, P], (0.0, 1.0)), an_episode([P, P], (0.5,))]
    credits, _ = credit_of(rollouts, [1.0, 1.0, 0.5])
    first = torch.tensor([1.0, 1.0, 0.5]) - 2.5 / 3
    torch.testing.assert_close(credits[0].advantages[0], first[0])
    assert credits[0].advantages[2:].tolist() == [-0.5, -0.5]
    assert credits[1].advantages[2:].tolist() == [0.5, 0.5]
    torch.testing.assert_close(credits[2].advantages, first[2].repeat(2))


def test_a_teachers_tokens_keep_the_advantage_of_their_response():
    rollouts = [an_episode([T, E, P], (0.0, 1.0)), an_episode([P, E, P], (0.0, 0.0))]
    credits, group = credit_of(rollouts, [1.0, 0.0], discount=0.5)
    whole = group_baseline(group, AlgorithmConfig())
    assert credits[0].advantages[0] == whole[0].advantages[0] == 0.5
    assert credits[1].advantages[0] == -0.25, "the mean of the returns from the first turn on is 0.25"
    assert credits[0].advantages[2] == 0.5 and credits[1].advantages[2] == -0.5


def test_returns_are_compared_with_those_that_make_the_baseline():
    rollouts = [an_episode([T, E, P], (0.0, 1.0)), an_episode([P, E, P], (0.0, 0.5)), an_episode([P, E, P])]
    credits, _ = credit_of(rollouts, [1.0, 0.5, 0.0], advantage="grpo_split")
    assert [float(credit.advantages[2]) for credit in credits] == [0.75, 0.25, -0.25]


def test_single_turns_are_credited_as_by_the_group():
    rollouts, rewards = [make_rollout(3), make_rollout(4)], [1.0, 0.0]
    credits, group = credit_of(rollouts, rewards, normalize_std=True)
    for ours, theirs in zip(credits, group_baseline(group, AlgorithmConfig(normalize_std=True)), strict=True):
        torch.testing.assert_close(ours.advantages, theirs.advantages)
    assert find_credit_function("per_turn").settings is PerTurn


@pytest.mark.parametrize("penalty", [0.5])
def test_a_length_penalty_counts_the_policys_tokens_alone(penalty):
    rollouts = [an_episode([P, E, E, E, E, E, P]), an_episode([P, P, P, P])]
    group = ScoredGroup(make_group([1.0, 1.0], rollouts), torch.tensor([1.0, 1.0]), [ScoredTokens()] * 2)
    cfg = AlgorithmConfig(credit={"name": "rloo", "length_penalty": penalty})
    found = find_credit_function(cfg.credit)(group, cfg)
    assert found[0] > found[1], "the longer reply is not the policy's"
