"""The policy: its model and optimizer, scoring of tokens, and the update of one mini-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from luffy.config import Config
from luffy.distributed.shard import keep_gathered, let_go_of_gathered, shard
from luffy.distributed.world import World
from luffy.learn.activations import Gathering, GradientCheckpointing
from luffy.learn.objective import Objective, Stats, mean_ratio
from luffy.learn.optim import AnyOptimizer, OffloadedOptimizer, Optimizer
from luffy.learn.packing import (
    Bin,
    Denominators,
    MicroBatches,
    computed_tokens,
    cut,
    denominators,
    idle_batch,
    pack,
    pack_bins,
    total_denominators,
)
from luffy.learn.scorer import Head, Scores, TokenScorer, read_head
from luffy.metrics import Mean, Metric, OnDevice, Sum, fetch
from luffy.models.load import DtypeName
from luffy.run_folder.timing import Stopwatch
from luffy.types import MicroBatch, Sample, TokenView


class NonFiniteUpdate(ArithmeticError):
    """The loss or the gradient of a mini-batch is NaN or infinite; the weights were not touched."""


class Totals(NamedTuple):
    """A mini-batch over all processes."""

    denominators: Denominators
    passes: int
    tokens: int  # of the samples
    computed: int  # of the rows the model runs over
    gathered: int  # bytes of weights and gradients kept until the last pass; 0: every pass gathers and reduces


class Policy:
    def __init__(
        self,
        model: nn.Module,
        cfg: Config,
        *,
        temperature: float | None = None,
        world: World | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        """``temperature`` of the scored distribution: that of the rollouts unless given (SFT: 1). In a world that
        was joined the model's weights are sharded here, before the optimizer sees them."""
        self.model, self.cfg, self.world, self.watch = model, cfg, world or World(), watch or Stopwatch()
        self.temperature = cfg.rollout.temperature if temperature is None else temperature
        self.device = self.world.device or next(model.parameters()).device
        model.eval()  # whoever scores tokens finds it so; only the gradient passes of an update run in training mode
        self.scorer = self.scorer_of(model)
        self.optimizer = (OffloadedOptimizer if cfg.optim.offload else Optimizer)(model, cfg.optim)
        self.sft_optimizer = _sft_optimizer(model, cfg, self.optimizer)
        self.checkpointing = GradientCheckpointing(model, cfg.model.gradient_checkpointing)
        self.gathering = Gathering(cfg, self.world, self.device, self.checkpointing)
        self.objective = Objective.of(cfg)
        self.anchor: TokenScorer | None = None  # with algorithm.sft_anchor; None: the policy without its adapters

    def scorer_of(self, model: nn.Module, dtype: DtypeName | None = None) -> TokenScorer:
        """A scorer of ``model``, sharded if the policy is; ``dtype``: what it computes in, if not the policy's."""
        scorer = TokenScorer(model)
        if self.world.joined:
            shard(scorer, self.cfg.parallel, dtype or self.cfg.model.dtype, self.device.type)
        return scorer

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the trained weights, by their names in ``optimizer.parameters``."""
        let_go_of_gathered(self.scorer)
        for name, parameter in self.optimizer.parameters.items():
            parameter.copy_(weights[name])

    def remove_clip(self, removed: bool) -> None:
        """Set whether the next updates leave the on-policy ratio unclipped."""
        settings = replace(self.objective.policy_loss, remove_clip=removed)
        self.objective = replace(self.objective, policy_loss=settings)

    def score(self, samples: Sequence[Sample], scorer: TokenScorer | None = None) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies of each sample's response tokens, [T] each, on the CPU, without gradients."""
        scored = self._scored(self._packed(samples, self._cut(samples, scorer)), scorer)
        found = [(b.order, b.response_lengths, s.log_prob, s.entropy) for b, s in scored]  # not the batches
        return _by_sample(len(samples), found)

    def log_probs(self, samples: Sequence[Sample], scorer: TokenScorer | None = None) -> list[Tensor]:
        """Log-probs of each sample's response tokens, [T], on the CPU, without gradients."""
        return [log_prob for log_prob, _ in self.score(samples, scorer)]

    def token_views(self, samples: Sequence[Sample]) -> list[TokenView]:
        """Log-prob and gradient weight of each token for the record, before the update: old policy = current policy."""
        if any(sample.old_log_probs is None for sample in samples):
            samples = [replace(sample, old_log_probs=None) for sample in samples]
        unreduced = pack(samples, self.cfg.batch.tokens, None, 1, share=self.scorer.shares_prompts)
        weigh = self.objective.gradient_weights
        scored = self._scored(unreduced, top=self.objective.top)
        found = [(b.order, b.response_lengths, s.log_prob, weigh(b, s.log_prob, s.top_entropy)) for b, s in scored]
        return [TokenView(log_prob, weight) for log_prob, weight in _by_sample(len(samples), found)]

    def _scored(
        self, batches: Sequence[MicroBatch], scorer: TokenScorer | None = None, top: int = 0
    ) -> Iterator[tuple[MicroBatch, Scores]]:
        """Each batch with the scores of its response tokens, without gradients. All processes go through as many
        passes as the one with the most."""
        scorer = scorer or self.scorer
        counts, gathered = zip(*self.world.gather((len(batches), self.gathering.of_scoring(scorer))), strict=True)
        passes, once = max(counts), min(gathered) > 0
        if once:
            keep_gathered(scorer, True)
        for i, batch in enumerate(chain(batches, [idle_batch()] * (passes - len(batches))), 1):
            if once and i == passes:
                keep_gathered(scorer, False)
            batch = batch.to(self.device)
            with torch.no_grad():
                scores = self._forward(batch, scorer, top)
            if i <= len(batches):
                yield batch, scores

    def reference_log_probs(self, samples: Sequence[Sample], reference: TokenScorer | None) -> list[Tensor]:
        """Log-probs under the reference model; with LoRA and none given, under the policy without its adapters."""
        if reference is not None:
            return self.log_probs(samples, reference)
        with self.model.disable_adapter():  # type: ignore[operator]
            return self.log_probs(samples)

    def sft_update(self, traces: Sequence[Sample]) -> dict[str, Metric]:
        """One SFT step by the optimizer that makes these alone (``sft_steps``); its metrics have names of their own."""
        assert self.sft_optimizer is not None
        metrics = self.update(traces, self.sft_optimizer.cfg.lr, self.sft_optimizer)
        return {
            "method/sft_steps": Sum(1),
            "method/sft_step_loss": metrics["actor/sft_loss"],
            "method/sft_step_grad_norm": metrics["actor/grad_norm"],
            **{name: metrics[name] for name in ("perf/update_tokens", "perf/computed_tokens")},
        }

    def update(self, samples: Sequence[Sample], lr: float, optimizer: AnyOptimizer | None = None) -> dict[str, Metric]:
        """One optimizer step on a mini-batch, whatever the number of micro-batches it takes; by ``optimizer`` instead
        of the policy's."""
        optimizer = optimizer or self.optimizer
        samples = self._drop_confident_tokens(samples)
        bins = self._cut(samples)
        totals = self._totals(samples, bins)
        batches = self._packed(samples, bins, totals.denominators)
        idle = [idle_batch()] * (totals.passes - len(batches))
        if totals.gathered:
            keep_gathered(self.scorer, True)
        off_ratio_mean = self._off_ratio_mean([*batches, *idle]) if self.objective.policy_loss.off_normalize else None
        self.model.train()
        try:
            parts = [
                self._accumulate(batch, off_ratio_mean, totals, number)
                for number, batch in enumerate(chain(batches, idle), 1)
            ]
        finally:
            self.model.eval()
        grad_norm = optimizer.grad_norm()  # asked for before the host waits for anything
        metrics = self.world.merge(fetch(parts))
        norm, loss = float(grad_norm), metrics["actor/loss"].value
        if not (math.isfinite(norm) and math.isfinite(loss)):
            optimizer.zero_grad()
            raise NonFiniteUpdate(f"loss {loss}, gradient norm {norm}")
        optimizer.step(lr, grad_norm)
        optimizer.zero_grad()
        # Sums over the micro-batches of this mini-batch; over mini-batches they average.
        sums = {name: Mean(m.value, float(m.measured)) for name, m in metrics.items() if isinstance(m, Sum)}
        return (
            metrics
            | sums
            | {
                "actor/grad_norm": Mean(norm),
                "actor/lr": Mean(lr),
                "perf/update_tokens": Sum(totals.tokens),
                "perf/computed_tokens": Sum(totals.computed),
            }
        )

    def _drop_confident_tokens(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Samples without the tokens whose probability exceeds ``all_max_clip``, also in the denominator."""
        bound = self.objective.policy_loss.all_max_clip
        if bound is None:
            return samples
        kept = [log_prob.exp() <= bound for log_prob in self.log_probs(samples)]
        return [replace(s, rl_weights=s.rl_weights * keep) for s, keep in zip(samples, kept, strict=True)]

    def _cut(self, samples: Sequence[Sample], scorer: TokenScorer | None = None) -> list[Bin]:
        with self.watch("pack", on_host=True):
            return cut(samples, self.cfg.batch.tokens, (scorer or self.scorer).shares_prompts)

    def _totals(self, samples: Sequence[Sample], bins: list[Bin]) -> Totals:
        """Denominators, passes and tokens of a mini-batch over all processes, in one exchange."""
        with self.watch("pack", on_host=True):
            tokens = (sum(map(len, samples)), computed_tokens(samples, bins))
            mine = (denominators(samples), len(bins), *tokens, self.gathering.of_update(self.scorer, samples, bins))
        counts, passes, trained, computed, gathered = zip(*self.world.gather(mine), strict=True)
        return Totals(total_denominators(counts), max(passes), sum(trained), sum(computed), min(gathered))

    def _packed(self, samples: Sequence[Sample], bins: list[Bin], whole: Denominators | None = None) -> MicroBatches:
        reduction, longest = self.cfg.algorithm.loss_reduction, self.cfg.rollout.max_tokens
        with self.watch("pack", on_host=True):
            return pack_bins(samples, bins, reduction, longest, whole)

    def _accumulate(self, batch: MicroBatch, off_ratio_mean: Tensor | None, totals: Totals, number: int) -> Stats:
        """``number`` of the pass, from 1 to that of the mini-batch's passes."""
        reserved = totals.gathered if number == 1 else 0  # later ones find it taken
        self.checkpointing.prepare(len(batch.input_ids), sum(batch.lengths), self.device, reserved)
        batch = batch.to(self.device)
        s = self._forward(batch, top=self.objective.top, anchor=self._anchor_head(batch))
        loss, stats = self.objective(batch, s.log_prob, s.entropy, off_ratio_mean, s.top_entropy, s.anchor_kl)
        if totals.gathered and number == totals.passes:
            keep_gathered(self.scorer, False)  # this pass reduces the gradients of all and frees the weights
        loss.backward()
        return {**stats, "actor/loss": OnDevice(Sum, (loss.detach(),))}

    def _forward(
        self, batch: MicroBatch, scorer: TokenScorer | None = None, top: int = 0, anchor: Head | None = None
    ) -> Scores:
        scores: Scores = (scorer or self.scorer)(batch, self.temperature, top, anchor)
        return scores

    def _anchor_head(self, batch: MicroBatch) -> Head | None:
        """What the reference's distributions of the batch are made of, if the SFT term is anchored to them."""
        if not self.objective.sft_anchor:
            return None
        if self.anchor is not None:
            return read_head(self.anchor, batch, self.temperature)
        with self.model.disable_adapter():  # type: ignore[operator]
            return read_head(self.scorer, batch, self.temperature)

    def _off_ratio_mean(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Mean off-policy ratio of the whole mini-batch, which ``off_normalize`` divides by."""
        ratios = []
        for batch in (b.to(self.device) for b in batches):
            with torch.no_grad():
                ratios.append(self.objective.off_ratios(batch, self._forward(batch).log_prob))
        every = torch.cat(ratios)
        if self.world.size > 1:
            mean = self.world.merge({"off_ratio": Mean(float(every.double().sum()), every.numel())})["off_ratio"]
            return torch.tensor(mean.value, device=self.device)
        return mean_ratio(every)


def _sft_optimizer(model: nn.Module, cfg: Config, other: AnyOptimizer) -> Optimizer | None:
    """The optimizer of ``sft_steps``: separate moments for the same weights."""
    s = cfg.sft_steps
    if not s.buffer:
        return None
    assert isinstance(other, Optimizer)
    settings = replace(cfg.optim, lr=s.lr or cfg.optim.lr, grad_clip=s.grad_clip)
    return Optimizer(model, settings, masters=other.masters)


def _by_sample(
    count: int, found: Sequence[tuple[tuple[int, ...], tuple[int, ...], Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Two streams of every sample, on the CPU, from those of every micro-batch with the numbers of its samples and
    their lengths. They are fetched when all passes are under way: waiting for each would leave the GPU idle while the
    next one is laid out."""
    out: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * count
    for order, lengths, *streams in found:
        first, second = (stream.cpu().split(lengths) for stream in streams)
        for i, pair in zip(order, zip(first, second, strict=True), strict=True):
            out[i] = pair
    return out
