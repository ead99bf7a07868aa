"""The second model that overrides tokens (`rollout.offpolicy_guidance`): loaded, checked, its rule by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from luffy.config import Config, OffPolicyGuidanceConfig
from luffy.core.override_rules import Rule
from luffy.models.forward import evaluating
from luffy.models.load import drop_padding_tokens, load_model, load_tokenizer, token_count
from luffy.models.same_tokens import check_fits, check_same_tokenizer
from luffy.rollout.overrides.coupled import Score
from luffy.rollout.vllm.http_client import Server, key_from
from luffy.rollout.vllm.served_model import ServedModel
from luffy.train.packing import pack
from luffy.train.scorer import TokenScorer
from luffy.train.vllm_settings import VLLM_SLOTS
from luffy.types import Request, Sample

SECTION = "rollout.offpolicy_guidance"


def load_second_model(cfg: Config, knobs: OffPolicyGuidanceConfig, tokenizer: Any, device: str) -> PreTrainedModel:
    """Frozen, without the rows of padding that would let it write what the policy cannot read; a UserError where its
    tokenizer, vocabulary or context does not fit the policy's."""
    check_same_tokenizer(tokenizer, load_tokenizer(knobs.model_path, cfg.model.trust_remote_code))
    model = load_model(knobs.model_path, knobs.dtype or cfg.model.dtype, device, cfg.model.trust_remote_code)
    check_fits(f"{SECTION}.model_path={knobs.model_path}", model.config, tokenizer, cfg.longest)
    drop_padding_tokens(model, token_count(tokenizer))
    model.requires_grad_(False).eval()
    return model


def second_servers(
    cfg: Config, knobs: OffPolicyGuidanceConfig, tokenizer: Any, warn: Callable[[str], None]
) -> ServedModel:
    """The second model on its servers; a UserError where tokenizer, vocabulary or context do not fit the policy's."""
    v = cfg.rollout.vllm
    key = key_from(v.api_key_env)
    return ServedModel(
        [Server(url, key, v.timeout_s, f"{SECTION}.servers") for url in knobs.servers],
        tokenizer,
        cfg.longest,
        slots=cfg.rollout.slots or VLLM_SLOTS,
        seeded=v.request_seeds,
        warn=warn,
    )


def scores_of(model: nn.Module, temperature: float, budget: int) -> Score:
    """Log-probs of given tokens under ``model``, from forward passes over at most ``budget`` tokens."""
    scorer, device = TokenScorer(model), next(model.parameters()).device

    def score(requests: Sequence[Request], token_ids: Sequence[Tensor]) -> list[Tensor]:
        samples = [_unweighted(request, ids) for request, ids in zip(requests, token_ids, strict=True)]
        found = [torch.empty(0)] * len(samples)
        with torch.no_grad(), evaluating(model):
            for batch in pack(samples, budget, None, 1, share=scorer.shares_prompts):
                log_probs, _ = scorer(batch.to(device), temperature)
                for i, part in zip(batch.order, log_probs.cpu().split(batch.response_lengths), strict=True):
                    found[i] = part
        return found

    return score


def _unweighted(request: Request, ids: Tensor) -> Sample:
    nothing = torch.zeros(ids.numel())
    return Sample(request.given_ids, ids, nothing.bool(), *[nothing] * 5)


def rule_at(knobs: OffPolicyGuidanceConfig, step: int, total_steps: int) -> Rule:
    """The rule of a step: tau and eps may have schedules."""
    return Rule(knobs.rule, tau=knobs.tau_at(step, total_steps), eps=knobs.eps_at(step, total_steps))
