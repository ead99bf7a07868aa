"""The policy: its model and optimizer, scoring of tokens, and the update of one mini-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from luffy.config import Config
from luffy.core.logprobs import selected_log_probs
from luffy.core.losses import off_policy_ratio
from luffy.core.masked import masked_mean
from luffy.metrics import Mean, Metric, OnDevice, Sum, fetch
from luffy.models.attention import PackedLayout
from luffy.models.forward import forward_hidden, head_weight_bias
from luffy.models.plain import plain_log_probs, runs_plain
from luffy.train.guide import importance_of
from luffy.train.memory import Checkpointing
from luffy.train.objective import Objective, Stats
from luffy.train.offload import OffloadedOptimizer
from luffy.train.optim import Optimizer
from luffy.train.packing import cut, pack
from luffy.types import MicroBatch, Sample, TokenView


class NonFiniteUpdate(ArithmeticError):
    """The loss or the gradient of a mini-batch is NaN or infinite; the weights were not touched."""


class Policy:
    def __init__(self, model: nn.Module, cfg: Config, *, temperature: float | None = None) -> None:
        """``temperature`` of the scored distribution: that of the rollouts unless given (SFT: 1)."""
        self.model, self.cfg = model, cfg
        self.temperature = cfg.rollout.temperature if temperature is None else temperature
        self.device = next(model.parameters()).device
        self.optimizer = (OffloadedOptimizer if cfg.optim.offload else Optimizer)(model, cfg.optim)
        self.checkpointing = Checkpointing(model, cfg.model.gradient_checkpointing)
        a = cfg.algorithm
        self.objective = Objective(
            policy_loss=a.policy_loss(),
            entropy_coef=a.entropy_coef,
            kl_coef=a.kl_coef if a.kl_in == "loss" else 0.0,
            kl_estimator=a.kl_estimator,
            sft_coef=a.sft_coef,
            recorded_teacher=a.teacher_probs == "recorded",
            importance=importance_of(cfg),
            weights_are="rollout" if cfg.rollout.guide is None else "guidance",
        )

    def log_probs(self, samples: Sequence[Sample], model: nn.Module | None = None) -> list[Tensor]:
        """Log-probs of each sample's response tokens, on the CPU, without gradients."""
        out: list[Tensor] = [torch.empty(0)] * len(samples)
        for part, _, log_prob in self._scored(samples, model):
            for i, piece in zip(part, _pieces(log_prob, samples, part), strict=True):
                out[i] = piece
        return out

    def token_views(self, samples: Sequence[Sample]) -> list[TokenView]:
        """What the record keeps of each token besides its text."""
        out: list[TokenView] = [TokenView(torch.empty(0), torch.empty(0))] * len(samples)
        for part, batch, log_prob in self._scored(samples):
            weights = self.objective.gradient_weights(batch, log_prob)
            pieces = zip(_pieces(log_prob, samples, part), _pieces(weights, samples, part), strict=True)
            for i, (own, weight) in zip(part, pieces, strict=True):
                out[i] = TokenView(own, weight)
        return out

    def _scored(
        self, samples: Sequence[Sample], model: nn.Module | None = None
    ) -> Iterator[tuple[list[int], MicroBatch, Tensor]]:
        """Which samples, their batch, and the log-probs of its response tokens, without gradients."""
        for part in cut([len(s) for s in samples], self.cfg.batch.tokens):
            # pack sorts by length as cut did, so the order within the bin is kept
            (batch,) = self._pack([samples[i] for i in part], budget=sum(len(samples[i]) for i in part))
            batch = batch.to(self.device)
            with torch.no_grad():
                log_prob, _ = self._forward(batch, model)
            yield part, batch, log_prob

    def reference_log_probs(self, samples: Sequence[Sample], reference: nn.Module | None) -> list[Tensor]:
        """Under the reference model; with LoRA and none given, under the policy without its adapters."""
        if reference is not None:
            return self.log_probs(samples, reference)
        with self.model.disable_adapter():  # type: ignore[operator]
            return self.log_probs(samples)

    def update(self, samples: Sequence[Sample], lr: float) -> dict[str, Metric]:
        """One optimizer step on a mini-batch, whatever the number of micro-batches it takes."""
        batches = self._pack(self._without_sure_tokens(samples), self.cfg.batch.tokens)
        off_ratio_mean = self._off_ratio_mean(batches)
        self.model.train()
        parts = [self._accumulate(batch, off_ratio_mean) for batch in batches]
        metrics = fetch(parts)
        grad_norm = self.optimizer.grad_norm()
        norm, loss = float(grad_norm), metrics["actor/loss"].value
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self.optimizer.zero_grad()
            raise NonFiniteUpdate(f"loss {loss}, gradient norm {norm}")
        self.optimizer.step(lr, grad_norm)
        self.optimizer.zero_grad()
        # Sums over the micro-batches of this mini-batch; over mini-batches they average.
        sums = {name: Mean(m.value) for name, m in metrics.items() if isinstance(m, Sum)}
        return (
            metrics
            | sums
            | {
                "actor/grad_norm": Mean(norm),
                "actor/lr": Mean(lr),
                "perf/update_tokens": Sum(sum(b.input_ids.numel() for b in batches)),
            }
        )

    def _without_sure_tokens(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """``all_max_clip`` drops tokens by their current probability, from the denominator too: known beforehand."""
        bound = self.objective.policy_loss.all_max_clip
        if bound is None:
            return samples
        kept = [log_prob.exp() <= bound for log_prob in self.log_probs(samples)]
        return [replace(s, rl_mask=s.rl_mask & keep) for s, keep in zip(samples, kept, strict=True)]

    def _pack(self, samples: Sequence[Sample], budget: int) -> list[MicroBatch]:
        return pack(samples, budget, self.cfg.algorithm.loss_reduction, self.cfg.rollout.max_tokens)

    def _accumulate(self, batch: MicroBatch, off_ratio_mean: Tensor | None) -> Stats:
        self.checkpointing.prepare(len(batch.input_ids), self.device)
        batch = batch.to(self.device)
        log_prob, entropy = self._forward(batch)
        loss, stats = self.objective(batch, log_prob, entropy, off_ratio_mean)
        loss.backward()
        return {**stats, "actor/loss": OnDevice(Sum, (loss.detach(),))}

    def _forward(self, batch: MicroBatch, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        model = self.model if model is None else model
        if runs_plain(model):
            return plain_log_probs(
                model, batch.input_ids, batch.lengths, batch.predict_from, batch.targets, self.temperature
            )
        layout = PackedLayout(batch.lengths, device=self.device)
        hidden = forward_hidden(model, batch.input_ids, batch.position_ids, layout)
        weight, bias = head_weight_bias(model)
        return selected_log_probs(hidden[batch.predict_from], weight, bias, batch.targets, temperature=self.temperature)

    def _off_ratio_mean(self, batches: Sequence[MicroBatch]) -> Tensor | None:
        """``off_normalize`` divides by a mean over the whole mini-batch, so it is known beforehand."""
        settings = self.objective.policy_loss
        if not settings.off_normalize:
            return None
        ratios = []
        for batch in (b.to(self.device) for b in batches):
            with torch.no_grad():
                log_prob, _ = self._forward(batch)
            off = batch.off_policy & (batch.rl_weights > 0)
            target = self.objective.target_probs(batch)
            ratios.append(off_policy_ratio(log_prob, off, settings.off_shape, target)[off])
        every = torch.cat(ratios)
        return masked_mean(every, torch.ones_like(every, dtype=torch.bool))


def _pieces(stream: Tensor, samples: Sequence[Sample], part: Sequence[int]) -> tuple[Tensor, ...]:
    return stream.cpu().split([samples[i].token_ids.numel() for i in part])
