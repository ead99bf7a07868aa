"""From rollouts to credit: rewards, rejection of groups without a signal, advantages per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from luffy.config import AlgorithmConfig, RewardConfig
from luffy.core.advantages import group_advantages
from luffy.core.kl import kl_penalty
from luffy.metrics import Max, Mean, Metric, Sum, spread
from luffy.models.load import decode
from luffy.rewards import Verifier
from luffy.types import Group, Rollout, Sample


def score(rollouts: Sequence[tuple[Rollout, ...]], verifier: Verifier, tokenizer: Any) -> list[Group]:
    """Rewards of all responses; a trace goes through the same verifier, so a wrong one earns its 0."""
    flat = [rollout for group in rollouts for rollout in group]
    texts = decode(tokenizer, [r.token_ids for r in flat])
    scores = iter(verifier.score([(r.task.problem, text) for r, text in zip(flat, texts, strict=True)]))
    return [Group(group[0].task, group, tuple(next(scores) for _ in group)) for group in rollouts]


def is_extreme(group: Group, cfg: RewardConfig) -> bool:
    """All solved or all failed: there is nothing to prefer."""
    return all_solved(group, cfg) or all_failed(group, cfg)


def all_solved(group: Group, cfg: RewardConfig) -> bool:
    return all(cfg.solved(s.value) for s in group.scores)


def all_failed(group: Group, cfg: RewardConfig) -> bool:
    return all(cfg.failed(s.value) for s in group.scores)


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """Log-probs of one rollout under the policy before the update and under the reference model."""

    old: Tensor | None = None
    ref: Tensor | None = None


def credit(
    groups: Sequence[Group], scored: Sequence[Sequence[ScoredTokens]], cfg: AlgorithmConfig
) -> list[list[Sample]]:
    """Samples of each group with their advantages as per-token streams."""
    rewards = _rewards(groups, scored, cfg)
    index = [i for i, group in enumerate(groups) for _ in group.rollouts]
    flat = [r for group in groups for r in group.rollouts]
    on_policy = torch.tensor([r.is_on_policy for r in flat], dtype=torch.bool)
    only_on_policy = cfg.advantage == "grpo_split" or cfg.trace_term == "sft"
    baseline = on_policy if only_on_policy else torch.ones_like(on_policy)
    advantages = iter(group_advantages(rewards, index, baseline, use_std=cfg.normalize_std).tolist())
    return [
        [_sample(r, next(advantages), s, cfg) for r, s in zip(group.rollouts, tokens, strict=True)]
        for group, tokens in zip(groups, scored, strict=True)
    ]


def _rewards(groups: Sequence[Group], scored: Sequence[Sequence[ScoredTokens]], cfg: AlgorithmConfig) -> Tensor:
    """One number a rollout: the verifier's, less the KL of the whole response when it goes in the reward."""
    rewards = torch.tensor([s.value for group in groups for s in group.scores], dtype=torch.float32)
    if cfg.kl_coef and cfg.kl_in == "reward" and groups:
        penalties = [_kl(tokens, cfg).sum() for group in scored for tokens in group]
        rewards = rewards - cfg.kl_coef * torch.stack(penalties)
    return rewards


def _kl(tokens: ScoredTokens, cfg: AlgorithmConfig) -> Tensor:
    assert tokens.old is not None and tokens.ref is not None
    return kl_penalty(tokens.old, tokens.ref, cfg.kl_estimator)


def reward_kl_metrics(scored: Sequence[Sequence[ScoredTokens]], cfg: AlgorithmConfig) -> dict[str, Metric]:
    """``critic/kl``: the mean KL per token that was taken off the rewards."""
    per_token = [_kl(tokens, cfg) for group in scored for tokens in group]
    return {"critic/kl": Mean(float(sum(t.sum() for t in per_token)), sum(t.numel() for t in per_token))}


def without_credit(rollout: Rollout) -> Sample:
    """A rollout as a sample that no loss counts yet: enough to score its tokens."""
    nothing = torch.zeros_like(rollout.off_policy)
    return Sample(
        prompt_ids=rollout.task.prompt_ids,
        token_ids=rollout.token_ids,
        off_policy=rollout.off_policy,
        rl_mask=nothing,
        sft_mask=nothing,
        advantages=torch.zeros(nothing.numel()),
        behavior_log_probs=rollout.behavior_log_probs,
        engine_log_probs=rollout.engine_log_probs,
    )


def _sample(rollout: Rollout, advantage: float, scored: ScoredTokens, cfg: AlgorithmConfig) -> Sample:
    off = rollout.off_policy
    in_sft = off if cfg.trace_term == "sft" else torch.zeros_like(off)
    weights = torch.where(off, cfg.prefix_alpha, cfg.prefix_beta)
    return replace(
        without_credit(rollout),
        rl_mask=~in_sft,
        sft_mask=in_sft,
        advantages=advantage * weights,
        old_log_probs=scored.old,
        ref_log_probs=scored.ref if cfg.kl_in == "loss" else None,
    )


def group_metrics(groups: Sequence[Group], cfg: RewardConfig) -> dict[str, Metric]:
    """What the rollouts of a step say, before any is rejected."""
    pairs = [(r, s) for g in groups for r, s in zip(g.rollouts, g.scores, strict=True)]
    own = [(r, s) for r, s in pairs if r.is_on_policy]
    guided = [(r, s) for r, s in pairs if not r.is_on_policy]
    lengths = [r.token_ids.numel() for r, _ in own]
    return {
        **spread("critic/score", (s.value for _, s in pairs)),
        **spread("critic/rewards", (s.value for _, s in own)),
        "batch/solve_all": Sum(sum(all_solved(g, cfg) for g in groups)),
        "batch/solve_none": Sum(sum(all_failed(g, cfg) for g in groups)),
        "batch/on_solved": Mean.of(cfg.solved(s.value) for _, s in own),
        "batch/off_solved": Mean.of(cfg.solved(s.value) for _, s in guided),
        "batch/avg_prefix_ratio": Mean.of(r.prefix_ratio for r, _ in guided),
        "batch/verifier_failures": Sum(sum(s.status not in ("ok", "no_answer") for _, s in pairs)),
        **spread("response_length", lengths),
        "response_length/clip_ratio": Mean.of(r.finish == "length" for r, _ in own),
    }


def staleness_metrics(groups: Sequence[Group], step: int) -> dict[str, Metric]:
    """How many versions behind the policy that made each of its tokens was."""
    versions = [r.versions for g in groups for r in g.rollouts]
    lags = [step - v[v >= 0] for v in versions]
    return {
        "async/staleness/mean": Mean(sum(int(lag.sum()) for lag in lags), sum(lag.numel() for lag in lags)),
        "async/staleness/max": Max(max((int(lag.max()) for lag in lags if lag.numel()), default=-math.inf)),
    }


def override_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """How much of the responses a guidance model wrote, over the tokens the engine made."""
    rollouts = [r for g in groups for r in g.rollouts if r.finish != "trace"]
    made = sum(int((~r.off_policy).sum()) for r in rollouts)
    put_in = sum(int(r.overrides.sum()) for r in rollouts)
    missing = sum(
        int((r.overrides & r.guidance_log_probs.isnan()).sum()) for r in rollouts if r.guidance_log_probs is not None
    )
    return {
        "guidance/token_ratio": Mean(put_in, made),
        "guidance/sequence_ratio": Mean.of(bool(r.overrides.any()) for r in rollouts),
        "guidance/missing_log_prob_ratio": Mean(missing, put_in),
    }
