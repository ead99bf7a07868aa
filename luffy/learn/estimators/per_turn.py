"""Credit turn by turn: what an environment gave from a turn on, compared with what it gave the other responses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from luffy.config import AlgorithmConfig
from luffy.core.advantages import group_advantages
from luffy.learn.credit import ScoredGroup, TokenCredit, credit_function, group_baseline, in_baseline
from luffy.schema import knob
from luffy.types import Author, Episode, is_drawn


@dataclass(frozen=True)
class PerTurn:
    discount: float = knob(1.0, "discount of rewards per turn", ge=0, le=1)


@credit_function("per_turn", settings=PerTurn, sft_term=False, follows_trace_term=True)
def per_turn(group: ScoredGroup, cfg: AlgorithmConfig, settings: PerTurn) -> list[TokenCredit]:
    """``group_baseline`` with an advantage of its own for each turn that the engine drew: the return from that turn on,
    compared among the responses that have such a turn. What a response scores beyond the rewards of its turns, such as
    the verifier's score, is a reward of its last turn. A teacher's tokens keep their response's advantage."""
    turns = [turn_numbers(rollout.authors) for rollout in group.rollouts]
    returns = [
        returns_of(rollout, float(reward), int(numbers.max()) + 1, settings.discount)
        for rollout, reward, numbers in zip(group.rollouts, group.rewards, turns, strict=True)
    ]
    index = [turn for of_response in returns for turn in range(len(of_response))]
    lengths = [len(of_response) for of_response in returns]
    counted = in_baseline(group.rollouts, cfg).repeat_interleave(torch.tensor(lengths))
    advantages = group_advantages(torch.cat(returns), index, counted, use_std=cfg.normalize_std).split(lengths)
    return [
        replace(given, advantages=torch.where(is_drawn(rollout.authors), own[numbers], given.advantages))
        for given, rollout, own, numbers in zip(
            group_baseline(group, cfg), group.rollouts, advantages, turns, strict=True
        )
    ]


def turn_numbers(authors: Tensor) -> Tensor:
    """[T] long: the turn, from 0, that each token belongs to; a reply belongs to the turn before it."""
    replies = authors == Author.ENVIRONMENT
    begins = ~replies & torch.cat([torch.zeros(1, dtype=torch.bool), replies[:-1]])
    return begins.cumsum(0)


def returns_of(rollout: Episode, reward: float, turns: int, discount: float) -> Tensor:
    """[turns] float32: for each turn the rewards from it on."""
    given = rollout.outcome.turn_rewards if rollout.outcome is not None else ()
    rewards = torch.zeros(turns)
    known = torch.tensor(given[:turns], dtype=torch.float32)
    rewards[: known.numel()] = known
    rewards[-1] += reward - float(known.sum())
    for turn in range(turns - 2, -1, -1):
        rewards[turn] += discount * rewards[turn + 1]
    return rewards
