"""Credit: from the rewards of a group to the weight of every token in the loss.

A credit function sees one problem at a time: its responses, their rewards and, where they were computed, log-probs
and entropies of the tokens. It says for every token how much it counts in the policy-gradient term, with which
advantage, and how much in the SFT term (``TokenCredit``). The loss only executes these streams. A function is
registered by name and chosen by ``algorithm.credit``; a new one is a file of its own:

    @credit_function("sft_by_confidence", needs=("entropy",))
    def sft_by_confidence(group, cfg):
        return [replace(c, sft_weights=c.sft_weights * torch.exp(-tokens.entropy))
                for c, tokens in zip(group_baseline(group, cfg), group.tokens)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from luffy.config import AlgorithmConfig
from luffy.core.advantages import group_advantages
from luffy.core.kl import kl_penalty
from luffy.errors import UserError
from luffy.metrics import Mean, Metric, spread
from luffy.registry import Registry
from luffy.types import Group, Rollout, Sample

Need = Literal["log_probs", "entropy", "teacher"]


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """Of the tokens of one response, [T] float32 each: log-probs and entropies under the policy before the update,
    log-probs under the reference model and under the teacher. None if not needed (``old`` and ``entropy`` of a credit
    function's ``needs`` are there for every group); the teacher's also if there is nothing to show it
    (``teacher.shown``)."""

    old: Tensor | None = None
    ref: Tensor | None = None
    entropy: Tensor | None = None
    teacher: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """What a credit function sees of one problem: n responses (``rollouts``) with scores, rewards and tokens. ``step``
    counts from 0."""

    group: Group
    rewards: Tensor  # [n] float32: the scores, less the KL of the whole response when it goes in the reward
    tokens: Sequence[ScoredTokens]  # n
    step: int = 0
    total_steps: int = 1

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return self.group.rollouts


@dataclass(frozen=True, eq=False)
class TokenCredit:
    """Of the tokens of one response, [T] float32 each: advantages, and weights in the RL and in the SFT term (0: not in
    it)."""

    advantages: Tensor
    rl_weights: Tensor
    sft_weights: Tensor


@dataclass(frozen=True)
class CreditFunction:
    """What ``credit_function`` registers; the fields are its arguments."""

    function: Callable[[ScoredGroup, AlgorithmConfig], list[TokenCredit]]
    needs: tuple[Need, ...] = ()
    lone_traces: bool = False

    def __call__(self, group: ScoredGroup, cfg: AlgorithmConfig) -> list[TokenCredit]:
        return self.function(group, cfg)

    def of_all(self, groups: Sequence[ScoredGroup], cfg: AlgorithmConfig) -> list[list[TokenCredit]]:
        """Of every group of a step."""
        if self.function is group_baseline.function:
            return group_baselines(groups, cfg)
        return [list(self.function(group, cfg)) for group in groups]


CREDIT: Registry[CreditFunction] = Registry("credit function")


def credit_function(
    name: str, needs: tuple[Need, ...] = (), lone_traces: bool = False
) -> Callable[[Callable[[ScoredGroup, AlgorithmConfig], list[TokenCredit]]], CreditFunction]:
    """A decorator that registers a credit function for ``algorithm.credit``: ``function(group, cfg)`` returns the
    credit of each response of the group.

    ``needs``: what must be computed before it is called, at the price of a forward pass (names of ``ScoredTokens``).
    ``lone_traces``: it learns from a group of whole traces only, so ``algorithm.reject_extreme`` keeps such a group.
    """
    return lambda function: CREDIT.register(name)(CreditFunction(function, needs, lone_traces))


def find_credit_function(name: str) -> CreditFunction:
    """The registered function of that name, or a user's own by ``module:function``."""
    found = CREDIT.find(name, "algorithm.credit")
    return found if isinstance(found, CreditFunction) else CreditFunction(found)


def needs_of(cfg: AlgorithmConfig) -> tuple[Need, ...]:
    """What must be computed before the credit of a step is decided."""
    needs = find_credit_function(cfg.credit).needs
    return needs if cfg.trace_entropy_share == 1 or "entropy" in needs else (*needs, "entropy")


@credit_function("group_baseline")
def group_baseline(group: ScoredGroup, cfg: AlgorithmConfig) -> list[TokenCredit]:
    """Reward minus the baseline of the group (``algorithm.advantage``), the same for every token of a response but for
    ``prefix_alpha``, ``prefix_beta`` and ``trace_advantage``; a teacher's tokens in the policy-gradient or the SFT term
    (``algorithm.trace_term``)."""
    return group_baselines([group], cfg)[0]


def group_baselines(groups: Sequence[ScoredGroup], cfg: AlgorithmConfig) -> list[list[TokenCredit]]:
    """``group_baseline`` of each. All responses at once: a step has thousands, and a small operation costs as much as
    a large one."""
    if not groups:
        return []
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    advantages = _advantages(groups, cfg).float()
    lengths = [rollout.token_ids.numel() for rollout in rollouts]
    own = torch.from_numpy(np.repeat(advantages.numpy(), lengths))  # many times as fast as torch's
    tokens = [tokens for group in groups for tokens in group.tokens]
    if all(rollout.is_on_policy for rollout in rollouts):
        streams = own * cfg.prefix_beta, torch.ones_like(own), torch.zeros_like(own)
    else:
        off = torch.cat([rollout.off_policy for rollout in rollouts])
        streams = _with_traces(own, off, lengths, tokens, cfg)
    credit = (TokenCredit(*parts) for parts in zip(*(stream.split(lengths) for stream in streams), strict=True))
    return [[next(credit) for _ in group.rollouts] for group in groups]


def _advantages(groups: Sequence[ScoredGroup], cfg: AlgorithmConfig) -> Tensor:
    """Of the responses of all groups."""
    rewards = torch.cat([group.rewards for group in groups])
    counted = _in_baseline([group.rollouts for group in groups], cfg)
    index = [i for i, group in enumerate(groups) for _ in group.rollouts]
    return group_advantages(rewards, index, counted, use_std=cfg.normalize_std)


def _with_traces(
    own: Tensor, off: Tensor, lengths: list[int], tokens: Sequence[ScoredTokens], cfg: AlgorithmConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, weights in the RL term and in the SFT term. ``own``: the advantage of each token's response."""
    on_trace = {"group": own, "constant": torch.ones(()), "relu": own.clamp(min=0)}[cfg.trace_advantage]
    advantages = torch.where(off, on_trace, own) * torch.where(off, cfg.prefix_alpha, cfg.prefix_beta)
    in_sft = off.float() if cfg.trace_term == "sft" else torch.zeros_like(own)
    return advantages, (1 - in_sft) * _counted(off, lengths, tokens, cfg), in_sft


def _in_baseline(groups: Sequence[Sequence[Rollout]], cfg: AlgorithmConfig) -> Tensor:
    """[n] bool, of the responses of all groups: whose rewards make the baseline."""
    if cfg.advantage == "grpo_split":
        return torch.tensor([r.is_on_policy for rollouts in groups for r in rollouts])
    if cfg.trace_term != "sft":
        return torch.ones(sum(map(len, groups)), dtype=torch.bool)
    return torch.cat([_with_own_tokens(rollouts) for rollouts in groups])


def _with_own_tokens(rollouts: Sequence[Rollout]) -> Tensor:
    """[n] bool: the responses with a token of the policy's own; all of them where none has one."""
    with_own_tokens = torch.tensor([not r.is_trace for r in rollouts])
    return with_own_tokens if with_own_tokens.any() else torch.ones_like(with_own_tokens)


def _counted(off: Tensor, lengths: list[int], tokens: Sequence[ScoredTokens], cfg: AlgorithmConfig) -> Tensor:
    """[T] float of the tokens of all groups: 1 on the policy's own and, in each response, on the
    ``trace_entropy_share`` of the teacher's with the highest entropy (of equal ones the first), else 0."""
    if cfg.trace_entropy_share == 1:
        return torch.ones(off.numel())
    counted = (~off).float()
    for teachers, view, scored in zip(off.split(lengths), counted.split(lengths), tokens, strict=True):
        assert scored.entropy is not None
        order = scored.entropy.masked_fill(~teachers, -torch.inf).argsort(descending=True, stable=True)
        view[order[: math.ceil(cfg.trace_entropy_share * int(teachers.sum()))]] = 1.0
    return counted


@credit_function("lone_trace_sft", lone_traces=True)
def lone_trace_sft(group: ScoredGroup, cfg: AlgorithmConfig) -> list[TokenCredit]:
    """A group of whole traces alone, without a response of the policy's own, goes into the SFT term with weight 1;
    any other group is credited by ``group_baseline``."""
    if not group.group.has_traces_alone:
        return group_baseline(group, cfg)
    nothing = [torch.zeros(r.token_ids.numel()) for r in group.rollouts]
    return [TokenCredit(none, rl_weights=none, sft_weights=torch.ones_like(none)) for none in nothing]


@credit_function("distill", needs=("log_probs", "teacher"))
def distill(group: ScoredGroup, cfg: AlgorithmConfig) -> list[TokenCredit]:
    """On-policy distillation: A = log q - log p on every own token that the teacher scored, of the policy before the
    update, plus ``distill_reward`` times the advantage of ``group_baseline``. A token with neither is not in the
    policy-gradient term."""
    credit = []
    for given, rollout, tokens in zip(group_baseline(group, cfg), group.rollouts, group.tokens, strict=True):
        taught = torch.zeros_like(rollout.off_policy) if tokens.teacher is None else ~rollout.off_policy
        gap = teacher_gap(tokens) if tokens.teacher is not None else torch.zeros(taught.numel())
        advantages = torch.where(taught, gap, 0.0) + cfg.distill_reward * given.advantages
        weights = given.rl_weights if cfg.distill_reward else taught.float()
        credit.append(replace(given, advantages=advantages, rl_weights=weights))
    return credit


def teacher_gap(tokens: ScoredTokens) -> Tensor:
    """log q - log p of each token."""
    assert tokens.teacher is not None and tokens.old is not None
    return tokens.teacher - tokens.old


@credit_function("srft", needs=("entropy",))
def srft(group: ScoredGroup, cfg: AlgorithmConfig) -> list[TokenCredit]:
    """SRFT (arXiv 2506.19767), with H the mean entropy of a response: own tokens have the advantage 0.1 exp(H) if the
    response scores above 0, else -1; a teacher's keep that of ``group_baseline`` and count in the SFT term too, with
    weight 0.5 exp(-H)."""
    credit = []
    rows = zip(group_baseline(group, cfg), group.rollouts, group.group.scores, group.tokens, strict=True)
    for given, rollout, score, tokens in rows:
        assert tokens.entropy is not None
        entropy, off = tokens.entropy.mean(), rollout.off_policy
        own = 0.1 * torch.exp(entropy) if score.value > 0 else torch.tensor(-1.0)
        advantages = torch.where(off, given.advantages, own)
        credit.append(replace(given, advantages=advantages, sft_weights=off * 0.5 * torch.exp(-entropy)))
    return credit


def credit(
    groups: Sequence[Group],
    scored: Sequence[Sequence[ScoredTokens]],
    cfg: AlgorithmConfig,
    step: int = 0,
    total_steps: int = 1,
) -> list[list[Sample]]:
    """Samples of each group with their credit, by the function that ``algorithm.credit`` names; ``algorithm.mix``
    multiplies the weights of both terms."""
    mu = None if cfg.mix is None else cfg.mix.at(step, total_steps)
    scored_groups = [
        ScoredGroup(group, rewards, tokens, step, total_steps)
        for group, rewards, tokens in zip(groups, rewards_of(groups, scored, cfg), scored, strict=True)
    ]
    credits = find_credit_function(cfg.credit).of_all(scored_groups, cfg)
    _check_one_each(scored_groups, credits, cfg.credit)
    return [
        [
            _sample(rollout, _mixed(given, mu), tokens.old, tokens.ref if cfg.kl_in == "loss" else None)
            for rollout, tokens, given in zip(group.rollouts, group.tokens, of_group, strict=True)
        ]
        for group, of_group in zip(scored_groups, credits, strict=True)
    ]


def _check_one_each(groups: Sequence[ScoredGroup], credits: Sequence[Sequence[TokenCredit]], name: str) -> None:
    """A function of the user's own may give too few credits or too many."""
    for group, given in zip(groups, credits, strict=True):
        if len(given) != len(group.rollouts):
            raise UserError(
                f"'algorithm.credit' ({name}) gave {len(given)} credits for the {len(group.rollouts)} responses "
                f"of problem {group.group.task.problem.id!r}; it must return one for each"
            )


def _mixed(credit: TokenCredit, mu: float | None) -> TokenCredit:
    """(1 - mu) RL + mu SFT; None: as it is."""
    if mu is None:
        return credit
    return replace(credit, rl_weights=(1 - mu) * credit.rl_weights, sft_weights=mu * credit.sft_weights)


def rewards_of(
    groups: Sequence[Group], scored: Sequence[Sequence[ScoredTokens]], cfg: AlgorithmConfig
) -> Sequence[Tensor]:
    """Of each group one number a rollout, [n] float32: the score, less the KL of the whole response when it goes in the
    reward."""
    scores = torch.tensor([score.value for group in groups for score in group.scores], dtype=torch.float32)
    rewards = scores.split([len(group.scores) for group in groups])
    if not (cfg.kl_coef and cfg.kl_in == "reward"):
        return rewards
    return [
        own - cfg.kl_coef * torch.stack([_kl(each, cfg).sum() for each in tokens])
        for own, tokens in zip(rewards, scored, strict=True)
    ]


def _kl(tokens: ScoredTokens, cfg: AlgorithmConfig) -> Tensor:
    assert tokens.old is not None and tokens.ref is not None
    return kl_penalty(tokens.old, tokens.ref, cfg.kl_estimator)


def credit_metrics(
    samples: Sequence[Sequence[Sample]],
    scored: Sequence[Sequence[ScoredTokens]],
    cfg: AlgorithmConfig,
    step: int = 0,
    total_steps: int = 1,
) -> dict[str, Metric]:
    """The spread of the advantages, each the mean over a response's tokens; ``critic/kl``: the mean KL per token that
    was taken off the rewards; ``method/mix_coef``: mu of ``algorithm.mix``; with a teacher the mean of log q - log p
    and the share of own tokens that it scored."""
    metrics = spread("critic/advantages", _means([s.advantages for group in samples for s in group]))
    if cfg.kl_coef and cfg.kl_in == "reward":
        per_token = [_kl(tokens, cfg) for group in scored for tokens in group]
        metrics["critic/kl"] = Mean(float(sum(t.sum() for t in per_token)), sum(t.numel() for t in per_token))
    if cfg.mix is not None:
        metrics["method/mix_coef"] = Mean(cfg.mix.at(step, total_steps))
    if "teacher" in find_credit_function(cfg.credit).needs:
        metrics |= _teacher_metrics(samples, scored)
    return metrics


def _means(streams: Sequence[Tensor]) -> list[float]:
    """Of each stream; of equal numbers exactly that."""
    if not streams:
        return []
    lengths = torch.tensor([stream.numel() for stream in streams])
    means: list[float] = torch.segment_reduce(torch.cat(list(streams)).double(), "mean", lengths=lengths).tolist()
    return means


def _teacher_metrics(
    samples: Sequence[Sequence[Sample]], scored: Sequence[Sequence[ScoredTokens]]
) -> dict[str, Metric]:
    gaps, own = [torch.empty(0)], 0
    for sample, tokens in zip((s for group in samples for s in group), (t for g in scored for t in g), strict=True):
        on_policy = ~sample.off_policy
        own += int(on_policy.sum())
        gaps += [teacher_gap(tokens)[on_policy]] if tokens.teacher is not None else []
    taught = torch.cat(gaps)
    return {
        "method/teacher_gap": Mean(float(taught.double().sum()), taught.numel()),
        "method/teacher_share": Mean(taught.numel(), own),
    }


def uncredited(rollout: Rollout) -> Sample:
    """A rollout as a sample that no loss counts: enough to score its tokens."""
    nothing = torch.zeros(rollout.token_ids.numel())
    return _sample(rollout, TokenCredit(nothing, nothing, nothing))


def _sample(rollout: Rollout, credit: TokenCredit, old: Tensor | None = None, ref: Tensor | None = None) -> Sample:
    return Sample(
        prompt_ids=rollout.task.prompt_ids,
        token_ids=rollout.token_ids,
        off_policy=rollout.off_policy,
        rl_weights=credit.rl_weights,
        sft_weights=credit.sft_weights,
        advantages=credit.advantages,
        behavior_log_probs=rollout.behavior_log_probs,
        engine_log_probs=rollout.engine_log_probs,
        old_log_probs=old,
        ref_log_probs=ref,
    )
