"""The second model that overrides tokens (`rollout.offpolicy_guidance`): loaded, checked, its rule by step."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from luffy.config import Config, OffPolicyGuidanceConfig
from luffy.core.override_rules import Rule
from luffy.models.load import drop_padding_tokens, load_model, load_tokenizer, token_count
from luffy.models.same_tokens import check_fits, check_same_tokenizer

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


def rule_at(knobs: OffPolicyGuidanceConfig, step: int, total_steps: int) -> Rule:
    """The rule of a step: tau and eps may have schedules."""
    return Rule(knobs.rule, tau=knobs.tau_at(step, total_steps), eps=knobs.eps_at(step, total_steps))
