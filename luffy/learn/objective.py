"""What one micro-batch adds to the loss, and what it tells about itself.

    sum of  w * (policy loss + kl_coef * KL - entropy_coef * H)   +   sft_coef * sum of  v * (c * KL_ref - u * f(p))

with w and v the weights of ``pack``: the samples' own, already divided by the mini-batch's denominators; f is log p
unless ``algorithm.sft_reshape`` names another shape, u is 1 unless ``algorithm.sft_weight`` names a weight, and KL_ref
with c, ``algorithm.sft_anchor``, is that of whole distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from luffy.config import Config
from luffy.config.parts import SFT_WEIGHTS
from luffy.core.losses import Importance, LossTerms, PolicyLoss, kl_penalty, off_policy_ratio, policy_loss_terms
from luffy.core.reduce import keep, masked_mean, response_means
from luffy.core.shaping import Shape, log_prob_slope
from luffy.metrics import EffectiveShare, Max, Mean, OnDevice, Sum
from luffy.schema import Chosen, knob
from luffy.types import MicroBatch


@dataclass(frozen=True, eq=False)
class SftTokens:
    """Response tokens of a micro-batch, [R], as a weight of the SFT term (``algorithm.sft_weight``) sees them, which
    returns a factor of each token's loss, without a gradient. Log-probs of now, those in the SFT term (``counted``),
    and where the weight needs them log-probs under the reference model and entropies of the likeliest tokens, in 0 to
    1. ``lengths`` of the responses sum to R."""

    log_prob: Tensor
    counted: Tensor
    lengths: Sequence[int]
    ref: Tensor | None = None
    top_entropy: Tensor | None = None


@SFT_WEIGHTS.register("none")
def none(tokens: SftTokens) -> Tensor:
    """1 everywhere."""
    return torch.ones_like(tokens.log_prob)


@dataclass(frozen=True)
class Eaft:
    top: int = knob(20, "likeliest tokens whose entropy counts", ge=2)


@SFT_WEIGHTS.register("eaft", settings=Eaft)
def eaft(tokens: SftTokens, settings: Eaft) -> Tensor:
    """EAFT (arXiv 2601.02151), tokens at which the policy is certain count less: the entropy of the ``top`` likeliest
    tokens, renormalised, over log ``top``: 0 if the policy is certain."""
    assert tokens.top_entropy is not None
    return tokens.top_entropy


@dataclass(frozen=True)
class IwSft:
    power: float = knob(1.0, "exponent of the ratio", ge=0)
    cap: float = knob(16.0, "largest weight", gt=0)


@SFT_WEIGHTS.register("iw_sft", settings=IwSft, needs_reference=True)
def iw_sft(tokens: SftTokens, settings: IwSft) -> Tensor:
    """iw-SFT (arXiv 2507.12856), traces that the policy has come to prefer over the reference count more:
    min((p / p_ref)^power, cap) of a whole trace, p / p_ref the geometric mean over its tokens."""
    assert tokens.ref is not None
    log_ratio = response_means(tokens.log_prob - tokens.ref, tokens.counted, tokens.lengths)
    return torch.exp(settings.power * log_ratio).clamp(max=settings.cap)


Stats = dict[str, OnDevice]
PLAIN_SFT = Shape("logp")
LARGEST_LOG_RATIO = 20.0  # keeps the squares of the weights finite


def importance_of(cfg: Config) -> Importance | None:
    """None where the policy itself, as it is now, drew every token: then no weight is computed at all."""
    a = cfg.algorithm
    if cfg.rollout.overrides is not None or cfg.may_be_stale:
        return Importance(
            clamp_min=a.importance_clamp_min,
            clamp_max=a.importance_clamp_max,
            detach=a.importance_detach,
            literal=a.importance_objective == "literal",
            level=a.importance_level,
        )
    if a.mismatch_correction == "truncated":
        return Importance(clamp_max=a.mismatch_cap)
    if a.mismatch_correction == "masked":
        return Importance(clamp_min=1 / a.mismatch_cap, clamp_max=a.mismatch_cap, mask=True)
    return None


@dataclass(frozen=True)
class Objective:
    """The loss of a micro-batch; ``Objective.of(cfg)`` is the one that a config describes."""

    policy_loss: PolicyLoss
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    sft_coef: float = 1.0
    sft_shape: Shape = PLAIN_SFT
    sft_weight: Chosen = field(default_factory=lambda: SFT_WEIGHTS.read("none", ""))
    sft_anchor: float = 0.0
    recorded_teacher: bool = False
    importance: Importance | None = None
    weight_metrics: str = "guidance"  # or "async" or "rollout", by what they correct: the group of their metrics

    @staticmethod
    def of(cfg: Config) -> Objective:
        a = cfg.algorithm
        return Objective(
            policy_loss=a.policy_loss(),
            entropy_coef=a.entropy_coef,
            kl_coef=a.kl_coef if a.kl_in == "loss" else 0.0,
            kl_estimator=a.kl_estimator,
            sft_coef=a.sft_coef,
            sft_shape=a.sft_shape(),
            sft_weight=a.sft_weight,
            sft_anchor=a.sft_anchor,
            recorded_teacher=a.teacher_probs == "recorded",
            importance=importance_of(cfg),
            weight_metrics="guidance" if cfg.rollout.overrides else "async" if cfg.may_be_stale else "rollout",
        )

    @property
    def top(self) -> int:
        """The number of likeliest tokens whose entropy it reads; 0: none."""
        return int(self.sft_weight.fact("top"))

    @property
    def of_tokens_alone(self) -> Objective:
        """The same without what needs more than log-prob and entropy of each token."""
        return replace(self, sft_weight=SFT_WEIGHTS.read("none", ""), sft_anchor=0.0)

    def __call__(
        self,
        batch: MicroBatch,
        log_prob: Tensor,
        entropy: Tensor,
        off_ratio_mean: Tensor | None = None,
        top_entropy: Tensor | None = None,
        anchor_kl: Tensor | None = None,
    ) -> tuple[Tensor, Stats]:
        """log_prob, entropy, and where they are read top_entropy and anchor_kl: [R], of the response tokens under the
        current policy. Without anchor_kl there is no anchor."""
        in_rl = batch.rl_weights != 0
        old = log_prob.detach() if batch.old_log_probs is None else batch.old_log_probs
        base, advantages, weights = old, batch.advantages, None
        if self.importance is not None:
            base, weights = self._corrected(batch, old, log_prob)
            advantages = advantages * weights
        terms = policy_loss_terms(
            base,
            log_prob,
            advantages,
            in_rl,
            batch.off_policy,
            self.policy_loss,
            target_probs=self.target_probs(batch),
            behavior_log_prob=batch.behavior_log_probs,
            off_ratio_mean=off_ratio_mean,
            lengths=batch.response_lengths,
        )
        per_token = terms.loss - self.entropy_coef * entropy
        stats = _stats(batch, terms, old, log_prob.detach(), entropy.detach(), in_rl)
        if terms.loss.requires_grad:
            stats["method/trace_weight_mean"] = _trace_weight(
                terms, log_prob, advantages.detach(), in_rl & batch.off_policy
            )
        if weights is not None:
            stats |= _weight_stats(weights.detach(), in_rl & batch.is_drawn, self.weight_metrics)
        if batch.ref_log_probs is not None and self.kl_coef:
            # Before the estimator: it overflows far from the reference, and inf * 0 is no number.
            kl = kl_penalty(keep(log_prob, in_rl), keep(batch.ref_log_probs, in_rl), self.kl_estimator)
            per_token = per_token + self.kl_coef * kl
            stats["actor/kl_loss"] = _over(kl, in_rl)
        in_sft, behavior = batch.sft_weights != 0, batch.behavior_log_probs
        shaped = off_policy_ratio(log_prob, in_sft, self.sft_shape, None, old, behavior)
        if self.sft_shape != PLAIN_SFT:
            stats["method/sft_weight_mean"] = _over(log_prob_slope(self.sft_shape, log_prob, old, behavior), in_sft)
        if self.sft_weight != "none":
            sft_weights = self._sft_weights(batch, log_prob.detach(), in_sft, top_entropy)
            shaped = shaped * sft_weights
            stats["method/sft_token_weight"] = _over(sft_weights, in_sft)
        if anchor_kl is not None:
            shaped = shaped - self.sft_anchor * keep(anchor_kl, in_sft)
            stats["method/sft_anchor_kl"] = _over(anchor_kl, in_sft)
        loss = (per_token * batch.rl_weights).sum() - self.sft_coef * (shaped * batch.sft_weights).sum()
        return loss, stats

    def _sft_weights(self, batch: MicroBatch, log_prob: Tensor, in_sft: Tensor, top_entropy: Tensor | None) -> Tensor:
        """[R]: the factor of each token's SFT loss."""
        tokens = SftTokens(log_prob, in_sft, batch.response_lengths, batch.ref_log_probs, top_entropy)
        weights: Tensor = SFT_WEIGHTS[self.sft_weight](tokens, *self.sft_weight.part.settings_for(self.sft_weight))
        return weights

    def gradient_weights(self, batch: MicroBatch, log_prob: Tensor, top_entropy: Tensor | None = None) -> Tensor:
        """[R]: |d loss / d logit| of each token's own logit, per unit of advantage.

        ``batch`` is packed without a reduction: its weights are the samples' own. The derivative of this very
        objective (shaping, clipping, importance weights, SFT term), so that a viewer shows what the update does and
        not a formula of its own. With ``off_normalize`` the mean is that of the tokens given. 0 where no term counts
        the token.
        """
        unit = replace(batch, advantages=torch.where(batch.advantages < 0, -1.0, 1.0))
        without_kl = replace(self, kl_coef=0.0)
        with torch.enable_grad():
            current = log_prob.detach().requires_grad_(True)
            loss, _ = without_kl(unit, current, torch.zeros_like(current), top_entropy=top_entropy)
            (slope,) = torch.autograd.grad(loss, current)
        return slope.abs() * -torch.expm1(current.detach())

    def _corrected(self, batch: MicroBatch, old: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """What the ratio divides by, and the importance weight of every token: 1 if the engine did not draw it."""
        assert self.importance is not None
        live = old if batch.old_log_probs is not None or self.importance.detach else log_prob
        behavior = torch.where(batch.is_drawn, batch.behavior_log_probs, live)
        weights = self.importance.weights(live, behavior, batch.response_lengths)
        base = self.importance.ratio_base(old, behavior)
        return torch.where(batch.is_drawn, base, old), torch.where(batch.is_drawn, weights, 1.0)

    def off_ratios(self, batch: MicroBatch, log_prob: Tensor) -> Tensor:
        """Ratios of the off-policy tokens that count in the policy-gradient term."""
        off = batch.off_policy & (batch.rl_weights != 0)
        shape, target = self.policy_loss.off_shape, self.target_probs(batch)
        return off_policy_ratio(log_prob, off, shape, target, batch.old_log_probs, batch.behavior_log_probs)[off]

    def target_probs(self, batch: MicroBatch) -> Tensor | None:
        return torch.exp(batch.behavior_log_probs) if self.recorded_teacher else None


def mean_ratio(ratios: Tensor) -> Tensor:
    """Mean of all ratios; that of none is 0."""
    return masked_mean(ratios, torch.ones_like(ratios, dtype=torch.bool))


def _over(values: Tensor, mask: Tensor) -> OnDevice:
    return OnDevice(Mean, (values.detach().float().masked_fill(~mask, 0.0).sum(), mask.sum()))


def _largest(values: Tensor, mask: Tensor) -> OnDevice:
    return OnDevice(Max, (values.float().masked_fill(~mask, -torch.inf).amax(),))


def _trace_weight(terms: LossTerms, log_prob: Tensor, advantages: Tensor, off: Tensor) -> OnDevice:
    """w of the trace tokens, whose gradient is w * A * grad log p: taken from the loss itself, where A is not 0."""
    (slope,) = torch.autograd.grad(terms.loss.sum(), log_prob, retain_graph=True)
    return _over(-slope / advantages, off & (advantages != 0))


def _weight_stats(weights: Tensor, on: Tensor, group: str) -> Stats:
    """Statistics of the weights as they are used. The engine's effective sample size is always in rollout/ess."""
    kept = weights.float().masked_fill(~on, 0.0)
    stats = {f"{group}/weight_mean": _over(weights, on), f"{group}/weight_max": _largest(weights, on)}
    return stats if group == "rollout" else {**stats, f"{group}/ess": _effective_share(kept, on)}


def _effective_share(weights: Tensor, on: Tensor) -> OnDevice:
    return OnDevice(EffectiveShare, (weights.sum(), weights.square().sum(), on.sum()))


def _mismatch(old: Tensor, engine: Tensor, on: Tensor) -> Stats:
    """How far the engine's probabilities are from the trainer's, on the tokens that the engine drew. The share is of
    the weights p_old / p_engine: 1 when both agree, less as few tokens come to carry the gradient."""
    known = on & ~engine.isnan()
    gap = (old - engine).masked_fill(~known, 0.0)
    ratios = gap.float().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().masked_fill(~known, 0.0)
    return {
        "rollout/logprob_diff_mean": _over(gap.abs(), known),
        "rollout/logprob_diff_max": _largest(gap.abs(), known),
        "rollout/ess": _effective_share(ratios, known),
    }


def _stats(b: MicroBatch, t: LossTerms, old: Tensor, log_prob: Tensor, entropy: Tensor, in_rl: Tensor) -> Stats:
    on, off = in_rl & b.is_drawn, in_rl & b.off_policy
    weighted = t.loss.detach() * b.rl_weights  # which hold the denominator
    return {
        "actor/pg_loss": OnDevice(Sum, (weighted.sum(), in_rl.sum())),
        "actor/on_pg_loss": _over(t.on_loss, on),
        "actor/off_pg_loss": _over(t.off_loss, off),
        "actor/entropy_loss": _over(entropy, in_rl),
        "actor/own_entropy": _over(entropy, on),
        "actor/pg_clipfrac": _over(t.clipped, in_rl),
        "actor/ppo_kl": _over(-t.log_ratio, in_rl),
        "actor/off_policy_prob": _over(t.prob, off),
        "actor/on_policy_prob": _over(t.old_prob, on),
        "actor/off_ratio_mean": _over(t.off_ratio, off),
        "actor/off_ratio_max_clip_frac": _over(t.off_max_clipped, off),
        "actor/off_ratio_min_clip_frac": _over(t.off_min_clipped, off),
        "actor/sft_loss": _over(-log_prob, b.sft_weights != 0),
        **_mismatch(old, b.engine_log_probs, on),
    }
