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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from luffy.config import AlgorithmConfig
from luffy.config.parts import BASELINES, CREDIT, CreditFunction, Need
from luffy.core.advantages import group_advantages, group_spread
from luffy.core.losses import kl_penalty
from luffy.errors import UserError
from luffy.metrics import Mean, Metric, spread
from luffy.registry import NoSettings
from luffy.schema import knob
from luffy.types import Author, Episode, Group, Sample, is_drawn


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """Values of one response's tokens, [T] float32 each: log-probs and entropies under the old policy, log-probs
    under reference model and teacher. None unless needed, or if there is nothing to show the teacher."""

    old: Tensor | None = None
    ref: Tensor | None = None
    entropy: Tensor | None = None
    teacher: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """One problem's n responses (``rollouts``) with rewards and tokens. ``step`` counts from 0."""

    group: Group
    rewards: Tensor  # [n] float32: the scores, less the KL of the whole response when it goes in the reward
    tokens: Sequence[ScoredTokens]  # n
    step: int = 0
    total_steps: int = 1

    @property
    def rollouts(self) -> tuple[Episode, ...]:
        return self.group.rollouts


@dataclass(frozen=True, eq=False)
class TokenCredit:
    """One response's tokens, [T] float32 each: advantages, and weights in the RL and SFT terms (0: not in it)."""

    advantages: Tensor
    rl_weights: Tensor
    sft_weights: Tensor


def credit_function(
    name: str, needs: tuple[Need, ...] = (), lone_traces: bool = False, *, settings: type = NoSettings, **facts: bool
) -> Callable[[Callable[..., Any]], CreditFunction]:
    """Register a credit function for ``algorithm.credit``: ``function(group, cfg)``, or ``function(group, cfg,
    settings)``.

    It returns one advantage per response (a tensor [n]), to which ``algorithm.normalize_std`` and the settings of
    traces (``algorithm.trace_advantage``, ``prefix_alpha``, ...) apply, or one ``TokenCredit`` per response, used as
    it is: start from those of ``group_baseline``.

    ``needs``: fields of ``ScoredTokens`` to compute first, each with a forward pass. ``lone_traces``: it also learns
    from trace-only groups, so ``algorithm.reject_extreme`` keeps them.

    Facts: ``needs_contrast`` (zero-variance groups give no gradient, default True), ``uses_rewards`` (default True),
    ``sft_term`` (it may fill the SFT term with any ``algorithm.trace_term``, default True), ``follows_trace_term``
    (off-policy tokens are only in that term, default False), ``scales`` (it divides its advantages itself, which
    excludes ``algorithm.normalize_std``, default False).
    """

    def register(function: Callable[..., Any]) -> CreditFunction:
        part = CreditFunction(function, settings, needs, lone_traces, **facts)
        CREDIT.register(name)(part)
        return part

    return register


def find_credit_function(name: str) -> CreditFunction:
    """The registered function of that name, or a user's own by ``module:function``."""
    return CREDIT.find(name, "algorithm.credit")


def needs_of(cfg: AlgorithmConfig) -> tuple[Need, ...]:
    """What must be computed before the credit of a step is decided."""
    needs = find_credit_function(cfg.credit).needs
    return needs if cfg.trace_entropy_share == 1 or "entropy" in needs else (*needs, "entropy")


@BASELINES.register("grpo")
def all_responses(rollouts: Sequence[Episode]) -> Tensor:
    """[n] bool: every response of the group (paper Eq. 4)."""
    return torch.ones(len(rollouts), dtype=torch.bool)


@BASELINES.register("grpo_split", needs_own=True)
def own_responses(rollouts: Sequence[Episode]) -> Tensor:
    """[n] bool: the responses that the policy wrote alone."""
    return torch.tensor([rollout.is_on_policy for rollout in rollouts])


def in_baseline(rollouts: Sequence[Episode], cfg: AlgorithmConfig) -> Tensor:
    """[n] bool: responses whose rewards make the baseline (``algorithm.advantage``). Whole traces outside the RL term
    are left out, unless there is nothing else."""
    baseline = BASELINES[cfg.advantage]
    counted: Tensor = baseline(rollouts, *baseline.settings_for(cfg.advantage))
    if cfg.trace_term != "rl" and counted.all():
        own = torch.tensor([not rollout.is_trace for rollout in rollouts])
        return own if own.any() else counted
    return counted


@credit_function("group_baseline", sft_term=False, follows_trace_term=True)
def group_baseline(group: ScoredGroup, cfg: AlgorithmConfig) -> list[TokenCredit]:
    """Reward minus the group's baseline (``algorithm.advantage``) for every token, with ``prefix_alpha``,
    ``prefix_beta``, ``trace_advantage`` and ``trace_term``."""
    return group_baselines([group], cfg)[0]


def group_baselines(groups: Sequence[ScoredGroup], cfg: AlgorithmConfig) -> list[list[TokenCredit]]:
    """``group_baseline`` of each. All responses at once: a step has thousands, and a small operation costs as much as
    a large one."""
    if not groups:
        return []
    rewards = torch.cat([group.rewards for group in groups])
    counted = torch.cat([in_baseline(group.rollouts, cfg) for group in groups])
    index = [i for i, group in enumerate(groups) for _ in group.rollouts]
    return with_traces(groups, group_advantages(rewards, index, counted, use_std=cfg.normalize_std), cfg)


def with_traces(groups: Sequence[ScoredGroup], advantages: Tensor, cfg: AlgorithmConfig) -> list[list[TokenCredit]]:
    """The credit of every token from one advantage a response ([n] of all groups): what ``algorithm.trace_*``,
    ``prefix_alpha`` and ``prefix_beta`` say about a teacher's tokens, whatever made the advantages."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.token_ids.numel() for rollout in rollouts]
    own = torch.from_numpy(np.repeat(advantages.float().numpy(), lengths))  # many times as fast as torch's
    tokens = [tokens for group in groups for tokens in group.tokens]
    if all(rollout.is_on_policy for rollout in rollouts):
        streams = own * cfg.prefix_beta, torch.ones_like(own), torch.zeros_like(own)
    else:
        off = torch.cat([rollout.off_policy for rollout in rollouts])
        streams = _trace_streams(own, off, lengths, tokens, cfg)
    credit = (TokenCredit(*parts) for parts in zip(*(stream.split(lengths) for stream in streams), strict=True))
    return [[next(credit) for _ in group.rollouts] for group in groups]


def _trace_streams(
    own: Tensor, off: Tensor, lengths: list[int], tokens: Sequence[ScoredTokens], cfg: AlgorithmConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, weights in the RL term and in the SFT term. ``own``: the advantage of each token's response."""
    on_trace = {"group": own, "constant": torch.ones(()), "relu": own.clamp(min=0)}[cfg.trace_advantage]
    advantages = torch.where(off, on_trace, own) * torch.where(off, cfg.prefix_alpha, cfg.prefix_beta)
    not_in_rl = torch.zeros_like(own) if cfg.trace_term == "rl" else off.float()
    in_sft = not_in_rl if cfg.trace_term == "sft" else torch.zeros_like(own)
    return advantages, (1 - not_in_rl) * _counted(off, lengths, tokens, cfg), in_sft


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


@credit_function("lone_trace_sft", lone_traces=True, follows_trace_term=True)
def lone_trace_sft(group: ScoredGroup, cfg: AlgorithmConfig) -> list[TokenCredit]:
    """A group of whole traces alone, without a response of the policy's own, goes into the SFT term with weight 1;
    any other group is credited by ``group_baseline``."""
    if not group.group.has_traces_alone:
        return group_baseline(group, cfg)
    nothing = [torch.zeros(r.token_ids.numel()) for r in group.rollouts]
    return [TokenCredit(none, rl_weights=none, sft_weights=torch.ones_like(none)) for none in nothing]


@dataclass(frozen=True)
class Distill:
    reward: float = knob(0.0, "weight of the group's advantage, added to log q - log p", ge=0)

    @property
    def uses_rewards(self) -> bool:
        return self.reward > 0

    @property
    def needs_contrast(self) -> bool:
        return self.reward > 0


@credit_function("distill", needs=("log_probs", "teacher"), settings=Distill, sft_term=False, follows_trace_term=True)
def distill(group: ScoredGroup, cfg: AlgorithmConfig, settings: Distill) -> list[TokenCredit]:
    """On-policy distillation: A = log q - log p on every own token that the teacher scored, of the policy before the
    update, plus ``reward`` times the advantage of ``group_baseline``. A token with neither is not in the
    policy-gradient term."""
    credit = []
    for given, rollout, tokens in zip(group_baseline(group, cfg), group.rollouts, group.tokens, strict=True):
        taught = torch.zeros_like(rollout.off_policy) if tokens.teacher is None else is_drawn(rollout.authors)
        gap = teacher_gap(tokens) if tokens.teacher is not None else torch.zeros(taught.numel())
        advantages = torch.where(taught, gap, 0.0) + settings.reward * given.advantages
        weights = given.rl_weights if settings.reward else taught.float()
        credit.append(replace(given, advantages=advantages, rl_weights=weights))
    return credit


def teacher_gap(tokens: ScoredTokens) -> Tensor:
    """log q - log p of each token."""
    assert tokens.teacher is not None and tokens.old is not None
    return tokens.teacher - tokens.old


@credit_function("srft", needs=("entropy",), needs_contrast=False, follows_trace_term=True)
def srft(group: ScoredGroup, cfg: AlgorithmConfig) -> list[TokenCredit]:
    """SRFT (arXiv 2506.19767), with H the mean entropy of a response: own tokens have the advantage 0.1 exp(H) if the
    response scores above 0, else -1; a teacher's keep that of ``group_baseline`` and count in the SFT term too, with
    weight 0.5 exp(-H)."""
    credit = []
    rows = zip(group_baseline(group, cfg), group.rollouts, group.group.scores, group.tokens, strict=True)
    for given, rollout, score, tokens in rows:
        assert tokens.entropy is not None
        entropy, off = without_environment(tokens.entropy, rollout.authors).mean(), rollout.off_policy
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
    reads_reference = cfg.kl_in == "loss" or cfg.sft_weight.part.needs_reference
    scored_groups = [
        ScoredGroup(group, rewards, tokens, step, total_steps)
        for group, rewards, tokens in zip(groups, rewards_of(groups, scored, cfg), scored, strict=True)
    ]
    credits = credit_of_all(scored_groups, cfg)
    return [
        [
            _sample(rollout, _mixed(given, mu), tokens.old, tokens.ref if reads_reference else None)
            for rollout, tokens, given in zip(group.rollouts, group.tokens, of_group, strict=True)
        ]
        for group, of_group in zip(scored_groups, credits, strict=True)
    ]


def credit_of_all(groups: Sequence[ScoredGroup], cfg: AlgorithmConfig) -> list[list[TokenCredit]]:
    """The credit of every group of a step, by the function that ``algorithm.credit`` names."""
    function = find_credit_function(cfg.credit)
    if function is group_baseline:
        return group_baselines(groups, cfg)
    credits = [function(group, cfg) for group in groups]
    for group, given in zip(groups, credits, strict=True):  # a function of the user's own may give too few or too many
        if len(given) != len(group.rollouts):
            raise UserError(
                f"'algorithm.credit' ({cfg.credit}) gave {len(given)} credits for the {len(group.rollouts)} responses "
                f"of problem {group.group.task.problem.id!r}; it must return one for each"
            )
    return [_of_tokens(group, given, cfg) for group, given in zip(groups, credits, strict=True)]


def _of_tokens(group: ScoredGroup, given: Tensor | Sequence[TokenCredit], cfg: AlgorithmConfig) -> list[TokenCredit]:
    """Credit of tokens as it is; one advantage a response over the group's spread if asked, with its traces treated."""
    if not isinstance(given, Tensor):
        return list(given)
    if cfg.normalize_std:
        given = given / group_spread(group.rewards, in_baseline(group.rollouts, cfg))
    return with_traces([group], given, cfg)[0]


def _mixed(credit: TokenCredit, mu: float | None) -> TokenCredit:
    """(1 - mu) RL + mu SFT; None: as it is."""
    if mu is None:
        return credit
    return replace(credit, rl_weights=(1 - mu) * credit.rl_weights, sft_weights=mu * credit.sft_weights)


def rewards_of(
    groups: Sequence[Group], scored: Sequence[Sequence[ScoredTokens]], cfg: AlgorithmConfig
) -> Sequence[Tensor]:
    """One [n] float32 tensor per group, a number per response: its score, minus the KL of the whole response if
    ``algorithm.kl_in`` is reward."""
    scores = torch.tensor([score.value for group in groups for score in group.scores], dtype=torch.float32)
    rewards = scores.split([len(group.scores) for group in groups])
    if not (cfg.kl_coef and cfg.kl_in == "reward"):
        return rewards
    return [
        own - cfg.kl_coef * torch.stack([_kl(*pair, cfg).sum() for pair in zip(group.rollouts, tokens, strict=True)])
        for own, group, tokens in zip(rewards, groups, scored, strict=True)
    ]


def _kl(response: Episode | Sample, tokens: ScoredTokens, cfg: AlgorithmConfig) -> Tensor:
    assert tokens.old is not None and tokens.ref is not None
    return without_environment(kl_penalty(tokens.old, tokens.ref, cfg.kl_estimator), response.authors)


def without_environment(stream: Tensor, authors: Tensor) -> Tensor:
    """The values of a response's tokens, without those that an environment wrote."""
    written = authors != Author.ENVIRONMENT
    return stream if written.all() else stream[written]


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
    every = [sample for group in samples for sample in group]
    metrics = spread("critic/advantages", _means([without_environment(s.advantages, s.authors) for s in every]))
    if cfg.kl_coef and cfg.kl_in == "reward":
        flat = [tokens for group in scored for tokens in group]
        per_token = [_kl(*pair, cfg) for pair in zip(every, flat, strict=True)]
        metrics["critic/kl"] = Mean(float(sum(t.sum() for t in per_token)), sum(t.numel() for t in per_token))
    if cfg.mix is not None:
        metrics["method/mix_coef"] = Mean(cfg.mix.at(step, total_steps))
    if "teacher" in find_credit_function(cfg.credit).needs:
        metrics |= _teacher_metrics(samples, scored)
    return metrics


def _means(streams: Sequence[Tensor]) -> list[float]:
    """Mean of each stream; exactly the number if all its numbers are equal."""
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
        on_policy = is_drawn(sample.authors)
        own += int(on_policy.sum())
        gaps += [teacher_gap(tokens)[on_policy]] if tokens.teacher is not None else []
    taught = torch.cat(gaps)
    return {
        "method/teacher_gap": Mean(float(taught.double().sum()), taught.numel()),
        "method/teacher_share": Mean(taught.numel(), own),
    }


def uncredited(rollout: Episode) -> Sample:
    """A rollout as a sample that no loss counts: enough to score its tokens."""
    nothing = torch.zeros(rollout.token_ids.numel())
    return _sample(rollout, TokenCredit(nothing, nothing, nothing))


def _sample(rollout: Episode, credit: TokenCredit, old: Tensor | None = None, ref: Tensor | None = None) -> Sample:
    if rollout.length < rollout.token_ids.numel():  # an environment's tokens are in no term and no denominator
        counts = (rollout.authors != Author.ENVIRONMENT).float()
        credit = replace(credit, rl_weights=credit.rl_weights * counts, sft_weights=credit.sft_weights * counts)
    return Sample(
        prompt_ids=rollout.task.prompt_ids,
        token_ids=rollout.token_ids,
        authors=rollout.authors,
        rl_weights=credit.rl_weights,
        sft_weights=credit.sft_weights,
        advantages=credit.advantages,
        behavior_log_probs=rollout.behavior_log_probs,
        engine_log_probs=rollout.engine_log_probs,
        old_log_probs=old,
        ref_log_probs=ref,
    )
