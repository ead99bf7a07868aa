"""The mixed objective (paper Eq. 6): on-policy term, off-policy term, SFT term; KL penalty and importance weights.

``policy_loss_terms`` is the one elementwise implementation. The public functions reduce it over
padded [B, T] tensors; the trainer reduces it over packed ones. Nothing here depends on the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from luffy.core.reduce import keep, masked_mean, response_means
from luffy.core.shaping import Shape
from luffy.registry import Part, Registry
from luffy.schema import Chosen


@dataclass(frozen=True)
class OnPolicyTerm(Part):
    """The policy-gradient term of on-policy tokens (``algorithm.on_policy_term``): from ``OnPolicyTokens`` to the loss
    of each token, and which tokens the clip touched. ``shapes``: it takes ``algorithm.on_policy_reshape``."""

    shapes: bool = False


ON_POLICY_TERMS: Registry[OnPolicyTerm] = Registry("on-policy term", OnPolicyTerm, home="luffy.core.losses")


@dataclass(frozen=True, eq=False)
class OnPolicyTokens:
    """What a term sees, in the shape of ``log_prob``. ``counted``: tokens that have this term; those of a response are
    ``lengths`` neighbours of a packed row, or without lengths a row of a padded batch. ``low`` and ``high`` bound the
    ratio; None: no clip."""

    log_prob: Tensor
    old: Tensor
    advantages: Tensor
    counted: Tensor
    lengths: Sequence[int] | None = None
    low: float | None = 0.8
    high: float | None = 1.2
    shape: Shape = Shape()

    def clip(self, ratio: Tensor) -> Tensor:
        return ratio if self.low is None and self.high is None else ratio.clamp(self.low, self.high)


def clipped_surrogate(tokens: OnPolicyTokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """-min(A r, A clip(r)), and where the clip made it larger."""
    plain = -tokens.advantages * ratio
    if tokens.low is None and tokens.high is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = -tokens.advantages * tokens.clip(ratio)
    return torch.maximum(plain, clipped), clipped > plain


@ON_POLICY_TERMS.register("ppo", shapes=True)
def ppo(tokens: OnPolicyTokens) -> tuple[Tensor, Tensor]:
    """PPO: the clipped ratio p / p_old of each token, or a shape of it."""
    return clipped_surrogate(tokens, tokens.shape.on_policy(tokens.log_prob, tokens.old))


@ON_POLICY_TERMS.register("cispo")
def cispo(tokens: OnPolicyTokens) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585), -sg(clip(r)) A log p: a token outside the bounds keeps a gradient, of the
    size at the bound."""
    ratio = torch.exp(tokens.log_prob.detach() - tokens.old)
    weight = tokens.clip(ratio).detach()
    return -weight * tokens.advantages * tokens.log_prob, weight != ratio


@ON_POLICY_TERMS.register("gspo")
def gspo(tokens: OnPolicyTokens) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv 2507.18071): PPO's term with s = exp(mean of log p - log p_old) over the response's tokens, at each
    of them; the gradient flows through the mean, so the clip drops a whole response or none of it."""
    ratio = torch.exp(response_means(tokens.log_prob - tokens.old, tokens.counted, tokens.lengths))
    return clipped_surrogate(tokens, ratio)


@dataclass(frozen=True)
class PolicyLoss:
    """The settings of the objective; ``clip_high`` and the off-policy clips are absolute ratios. ``on_term``: which
    on-policy term. With ``off_ppo`` off-policy tokens have that term too, instead of ``off_shape``."""

    clip_low: float = 0.8
    clip_high: float = 1.2
    remove_clip: bool = False
    on_shape: Shape = Shape()
    off_shape: Shape = Shape()
    off_max_clip: float | None = None
    off_min_clip: float | None = None
    off_normalize: bool = False
    off_ppo: bool = False
    all_max_clip: float | None = None
    on_term: Chosen = field(default_factory=lambda: ON_POLICY_TERMS.read("ppo", ""))

    def __post_init__(self) -> None:
        self.on_shape.require_ratios()


@dataclass(frozen=True, eq=False)
class LossTerms:
    """Per token, in the shape of the inputs. Outside the mask the losses are 0, and the rest means nothing.

    ``loss`` is the off-policy term on off-policy tokens and the on-policy term elsewhere, 0 where
    ``all_max_clip`` dropped the token (``kept`` False).
    """

    loss: Tensor
    on_loss: Tensor
    off_loss: Tensor
    off_ratio: Tensor
    clipped: Tensor
    off_max_clipped: Tensor
    off_min_clipped: Tensor
    log_ratio: Tensor
    prob: Tensor
    old_prob: Tensor
    kept: Tensor


def policy_loss_terms(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    off_policy: Tensor,
    settings: PolicyLoss,
    *,
    target_probs: Tensor | None = None,
    behavior_log_prob: Tensor | None = None,
    off_ratio_mean: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> LossTerms:
    """``behavior_log_prob``, of whoever wrote the token, is for shapes that compare with it (None: probability 1).
    ``off_ratio_mean`` is the mean that ``off_normalize`` divides by when the caller holds only part
    of the batch; without it the mean over the given off-policy tokens is taken. ``lengths`` of the responses in a
    packed row; without them each row is a response."""
    mask = mask.bool()
    old, logp = keep(old_log_prob, mask), keep(log_prob, mask)
    # Each term sees gradients of its own tokens only: an overflow in the other cannot turn into 0 * inf.
    on_logp = logp if settings.off_ppo else torch.where(off_policy, logp.detach(), logp)
    counted = mask if settings.off_ppo else mask & ~off_policy
    on_loss, clipped = _on_policy_term(old, on_logp, advantages, counted, lengths, settings)
    off = off_policy & mask
    if settings.off_ppo:
        off_ratio, off_loss = keep(torch.exp(logp.detach() - old), off), on_loss
        bounded = off_ratio
    else:
        off_logp = torch.where(off_policy, logp, logp.detach())
        off_ratio = off_policy_ratio(off_logp, off, settings.off_shape, target_probs, old, behavior_log_prob)
        if settings.off_normalize:
            mean = masked_mean(off_ratio, off).detach() if off_ratio_mean is None else off_ratio_mean
            off_ratio = off_ratio / torch.where(mean == 0, torch.ones_like(mean), mean)
        low, high = settings.off_min_clip, settings.off_max_clip
        bounded = off_ratio if low is None and high is None else off_ratio.clamp(low, high)
        off_loss = -advantages * bounded
    prob = torch.exp(logp.detach())
    kept = mask if settings.all_max_clip is None else mask & (prob <= settings.all_max_clip)
    return LossTerms(
        loss=keep(torch.where(off_policy, off_loss, on_loss), kept),
        on_loss=keep(on_loss, mask),
        off_loss=keep(off_loss, mask),
        off_ratio=bounded,
        clipped=clipped,
        off_max_clipped=_beyond(off_ratio, settings.off_max_clip, upper=True),
        off_min_clipped=_beyond(off_ratio, settings.off_min_clip, upper=False),
        log_ratio=logp - old,
        prob=prob,
        old_prob=torch.exp(old),
        kept=kept,
    )


def _on_policy_term(
    old: Tensor, logp: Tensor, advantages: Tensor, counted: Tensor, lengths: Sequence[int] | None, s: PolicyLoss
) -> tuple[Tensor, Tensor]:
    low, high = (None, None) if s.remove_clip else (s.clip_low, s.clip_high)
    tokens = OnPolicyTokens(logp, old, advantages, counted, lengths, low, high, s.on_shape)
    loss: tuple[Tensor, Tensor] = ON_POLICY_TERMS[s.on_term](tokens, *s.on_term.part.settings_for(s.on_term))
    return loss


def off_policy_ratio(
    logp: Tensor,
    off: Tensor,
    shape: Shape,
    target_probs: Tensor | None,
    old: Tensor | None = None,
    behavior: Tensor | None = None,
) -> Tensor:
    """f(p) of the off-policy tokens, or p over the teacher's recorded probability; 0 elsewhere. For shapes that see
    them: ``old`` and ``behavior``, the log-probs under the policy before the update and under the writer."""
    if target_probs is None:
        return keep(shape.off_policy(logp, old, None if behavior is None else keep(behavior, off)), off)
    return keep(torch.exp(logp) / (keep(target_probs, off) + 1e-6), off)


def _beyond(ratio: Tensor, bound: float | None, *, upper: bool) -> Tensor:
    if bound is None:
        return torch.zeros_like(ratio, dtype=torch.bool)
    return ratio >= bound if upper else ratio <= bound


def compute_token_on_off_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    eos_mask: Tensor,
    cliprange: float,
    clip_upper_bound: float,
    prefix_mask: Tensor,
    off_cliprange: float | None,
    off_normalize: bool = False,
    off_abs_cliprange: float | None = None,
    off_max_clip: float | None = None,
    off_min_clip: float | None = None,
    all_max_clip: float | None = None,
    off_policy_reshape: str = "no_reshape",
    off_policy_reshape_weight: float = 1.0,
    off_policy_reshape_pow_exp: float = 0.5,
    on_policy_reshape: str = "no_reshape",
    on_policy_reshape_weight: float = 1.0,
    on_policy_reshape_pow_exp: float = 0.5,
    target_probs: Tensor | None = None,
    loss_remove_token_mean: bool = False,
    loss_remove_clip: bool = False,
) -> dict[str, Tensor]:
    """The mixed loss of a padded batch and its metrics; all tensors [B, T], ``prefix_mask`` bool.

    ``off_cliprange`` and ``off_abs_cliprange`` belong to the published signature and change nothing:
    the paper leaves the off-policy ratio unclipped (section 3.1); use ``off_max_clip`` to bound it.
    """
    settings = PolicyLoss(
        clip_low=1.0 - cliprange,
        clip_high=max(clip_upper_bound, 1.0 + cliprange),
        remove_clip=loss_remove_clip,
        on_shape=Shape(on_policy_reshape, on_policy_reshape_weight, on_policy_reshape_pow_exp),
        off_shape=Shape(off_policy_reshape, off_policy_reshape_weight, off_policy_reshape_pow_exp),
        off_max_clip=off_max_clip,
        off_min_clip=off_min_clip,
        off_normalize=off_normalize,
        all_max_clip=all_max_clip,
    )
    mask, prefix = eos_mask.bool(), prefix_mask.bool()
    terms = policy_loss_terms(old_log_prob, log_prob, advantages, mask, prefix, settings, target_probs=target_probs)
    if loss_remove_token_mean:
        pg_loss = terms.loss.sum() / terms.loss.shape[-1]
    else:
        pg_loss = masked_mean(terms.loss, terms.kept)
    on, off = mask & ~prefix, mask & prefix
    return {
        "pg_loss": pg_loss,
        "off_pg_loss": masked_mean(terms.off_loss, off),
        "on_pg_loss": masked_mean(terms.on_loss, on),
        "off_pg_clipfrac": pg_loss.new_zeros(()),
        "on_pg_clipfrac": masked_mean(terms.clipped.float(), mask),
        "ppo_kl": masked_mean(-terms.log_ratio, mask),
        "off_policy_prob": masked_mean(terms.prob, off),
        "on_policy_prob": masked_mean(terms.old_prob, on),
        "off_ratio_mean": masked_mean(terms.off_ratio, off),
        "off_ratio_max_clip_frac": masked_mean(terms.off_max_clipped.float(), off),
        "off_ratio_min_clip_frac": masked_mean(terms.off_min_clipped.float(), off),
    }


def compute_sft_pure_loss(log_prob: Tensor, eos_mask: Tensor) -> Tensor:
    """Masked mean of the negative log-likelihood; an empty mask gives 0 with a gradient of 0."""
    return masked_mean(-log_prob, eos_mask)


Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) from the log-probs of sampled tokens, per token. k1 is unbiased and may be negative; k2
    has low variance; k3 is unbiased and >= 0."""
    log_ratio = log_prob - ref_log_prob
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return torch.exp(-log_ratio) - 1 + log_ratio
    raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")


@dataclass(frozen=True)
class Importance:
    """Importance weights of tokens that were not drawn from the policy as the trainer computes it: a second model
    overrides tokens, an engine's probabilities differ from the trainer's, or older weights made the rollout
    (async.max_staleness, rollout.max_tokens_per_step). What the token was drawn with is known, so the weight of a token
    is p_old / p_behaviour, and the expectation of weight * f is the policy's own.

    ``decoupled`` (default): the ratio is p / p_old, clipped as ever, and the advantage is multiplied by the weight.
    ``literal``: the ratio is p / p_behaviour AND the advantage is multiplied by the weight, as the note that
    introduced the idea has it; that corrects twice, and its gradient is not the policy's.

    ``level`` "token": every token has its own weight, as ratios in PPO; low variance, and a bias, since neither the
    tokens before nor those after it are corrected. "sequence": every token has the product over its response; no
    bias, and a variance that grows with the response's length.

    ``mask``: weights outside the bounds become 0 instead of the bound, which drops their tokens from
    the policy gradient.
    """

    clamp_min: float = 0.0
    clamp_max: float = 10.0
    detach: bool = True
    literal: bool = False
    level: Literal["token", "sequence"] = "token"
    mask: bool = False

    def weights(self, old_log_prob: Tensor, behavior_log_prob: Tensor, lengths: Sequence[int]) -> Tensor:
        """[R], of responses laid end to end, ``lengths`` tokens each."""
        log_weights = old_log_prob - behavior_log_prob
        if self.level == "sequence":
            # A reward belongs to the whole response, so the tokens after t need their correction as those before.
            log_weights = torch.cat([part.sum().expand_as(part) for part in log_weights.split(list(lengths))])
        weights = log_weights.exp()
        if self.mask:
            weights = torch.where((weights >= self.clamp_min) & (weights <= self.clamp_max), weights, 0.0)
        else:
            weights = weights.clamp(self.clamp_min, self.clamp_max)
        return weights.detach() if self.detach else weights

    def ratio_base(self, old_log_prob: Tensor, behavior_log_prob: Tensor) -> Tensor:
        """What the on-policy ratio divides by."""
        return behavior_log_prob if self.literal else old_log_prob
