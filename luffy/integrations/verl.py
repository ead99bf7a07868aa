"""LUFFY in verl: the objective as policy losses, and the baseline of on-policy samples as an advantage estimator.

Importing this module (``VERL_USE_EXTERNAL_MODULES=luffy.integrations.verl`` does it in every process) registers with
verl's own decorators

    actor_rollout_ref.actor.policy_loss.loss_mode    luffy, luffy_clip, mixed
    algorithm.adv_estimator                          luffy_grpo_split

verl hands a policy loss no field of the user's. So the off-policy mask travels in ``old_log_probs``, as a value that
no log-prob has: ``mark_off_policy``. The estimator gets it by the one field that verl passes on, ``reward_baselines``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from luffy.core.advantages import compute_grpo_outcome_advantage_split
from luffy.core.losses import LossTerms, PolicyLoss, policy_loss_terms
from luffy.core.reduce import masked_mean
from luffy.core.shaping import Shape
from luffy.errors import ConfigError

try:
    from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
except ImportError as error:
    raise ImportError("luffy.integrations.verl needs verl: pip install verl==0.9.1") from error

OFF_POLICY = 1.0  # in place of the old log-prob of a token that a teacher wrote; a log-prob is never above 0

VerlLoss = Callable[..., tuple[Tensor, dict[str, float]]]


def mark_off_policy(old_log_probs: Tensor, prefix_mask: Tensor) -> Tensor:
    """``old_log_probs`` with ``OFF_POLICY`` at the tokens of ``prefix_mask``, which a teacher wrote; [B, T] both.

    To be called after verl has computed ``old_log_probs`` and advantages, before the update of the actor.
    """
    if old_log_probs.shape != prefix_mask.shape:
        raise ConfigError(
            f"prefix_mask has the shape {list(prefix_mask.shape)}, old_log_probs {list(old_log_probs.shape)}; "
            "the mask has one entry a response token"
        )
    return old_log_probs.masked_fill(prefix_mask.bool(), OFF_POLICY)


def register_luffy_loss(name: str, off_policy_reshape: str = "p_div_p_0.1", remove_clip: bool = True) -> VerlLoss:
    """Register luffy's objective as ``policy_loss.loss_mode=name``.

    ``off_policy_reshape``: f(p) on marked tokens, any shape of p alone. ``remove_clip``: no clipping of the policy's
    own ratio; else ``actor.clip_ratio_low`` and ``actor.clip_ratio_high`` hold (verl's ``clip_ratio_c`` does not). The
    denominator is ``actor.loss_agg_mode``.
    """
    shape = Shape(off_policy_reshape)
    if shape.compares:
        raise ConfigError(
            f"{off_policy_reshape} needs the old log-probs of trace tokens, in whose place is the mark; "
            "take a shape of p alone, such as p_div_p_0.1"
        )

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        mask = response_mask.bool()
        off_policy = (old_log_prob > 0.5) & mask
        old = torch.where(off_policy, log_prob.detach(), old_log_prob)
        if rollout_is_weights is not None:  # they correct for the engine, which did not write the traces
            advantages = advantages * torch.where(off_policy, 1.0, rollout_is_weights)
        clips = {"clip_low": 1 - config.clip_ratio_low, "clip_high": 1 + config.clip_ratio_high}
        settings = PolicyLoss(**clips, remove_clip=remove_clip, off_shape=shape)
        terms = policy_loss_terms(old, log_prob, advantages, mask, off_policy, settings)
        pg_loss = agg_loss(loss_mat=terms.loss, loss_mask=mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
        return pg_loss, _metrics(terms, mask & ~off_policy, off_policy)

    registered: VerlLoss = register_policy_loss(name)(loss)
    return registered


def _metrics(terms: LossTerms, own: Tensor, off_policy: Tensor) -> dict[str, float]:
    """Metrics of one micro-batch; verl averages them over micro-batches, so a set without tokens gives 0."""
    return {
        "actor/pg_clipfrac": masked_mean(terms.clipped.float(), own).item(),
        "actor/ppo_kl": masked_mean(-terms.log_ratio.detach(), own).item(),
        "actor/on_pg_loss": masked_mean(terms.on_loss.detach(), own).item(),
        "actor/off_pg_loss": masked_mean(terms.off_loss.detach(), off_policy).item(),
        "actor/off_policy_prob": masked_mean(terms.prob, off_policy).item(),
        "actor/off_ratio_mean": masked_mean(terms.off_ratio.detach(), off_policy).item(),
        "actor/off_policy_tokens": float(off_policy.sum()),
    }


luffy = register_luffy_loss("luffy")
luffy_clip = register_luffy_loss("luffy_clip", remove_clip=False)
mixed = register_luffy_loss("mixed", off_policy_reshape="no_reshape", remove_clip=False)


@register_adv_est("luffy_grpo_split")
def luffy_grpo_split(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable] | None = None,
    config: Any = None,
    reward_baselines: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """GRPO with the baseline of on-policy samples alone, over their standard deviation if
    ``algorithm.norm_adv_by_std_in_grpo``. ``index`` is verl's ``uid``.

    ``reward_baselines``, [B]: 1 for on-policy samples, 0 for those with a teacher's tokens.
    """
    if reward_baselines is None or index is None:
        raise ConfigError(
            "luffy_grpo_split needs in the batch 'uid' and 'reward_baselines', 1 for on-policy samples and 0 for those "
            "with a teacher's tokens; a trainer that does not pass it on has adv_estimator=grpo alone"
        )
    use_std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    own = reward_baselines.bool()
    return compute_grpo_outcome_advantage_split(token_level_rewards, response_mask, list(index), own, use_std=use_std)
