"""The engine that rolls out: the policy alone, or with a guidance model beside it (docs/overrides.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from luffy.config import Config, OffPolicyGuidanceConfig
from luffy.core.override_rules import Rule
from luffy.errors import UserError
from luffy.models.load import drop_padding_tokens, load_model, load_tokenizer, token_count
from luffy.rollout.engine import Engine
from luffy.rollout.native import NativeEngine
from luffy.rollout.overrides.aligned import AlignedEngine
from luffy.rollout.overrides.pair_checks import check_same_tokenizer
from luffy.rollout.overrides.speculative import SpeculativeEngine
from luffy.rollout.overrides.turns import TurnsEngine, check_log_probs, check_takes_turns

BeforeStep = Callable[[int], None]
SECTION = "rollout.offpolicy_guidance"


def build_rollout_engine(
    cfg: Config, engine: Engine, tokenizer: Any, device: str, total_steps: int
) -> tuple[Engine, BeforeStep]:
    """The engine, and what to call before each step so that its schedule moves.

    ``engine`` is the policy's. Beside the native one the guidance model judges token by token; any other shows only
    what it drew, and the two take turns where the rule allows it.
    """
    guide = cfg.rollout.guide
    if guide is None:
        return engine, lambda step: None
    if not isinstance(engine, NativeEngine):
        check_takes_turns(guide.rule, type(engine).__name__)
        check_log_probs(engine, cfg.sampling)
    check_same_tokenizer(tokenizer, load_tokenizer(guide.model_path, cfg.model.trust_remote_code))
    model = load_guidance_model(cfg, guide, tokenizer, device)
    if guide.rule == "aligned":
        _check_alignable(guide)
        return AlignedEngine(engine, NativeEngine(model, max_slots=cfg.rollout.slots)), lambda step: None
    guided = _token_by_token(cfg, guide, engine, model, rule_at(guide, 0, total_steps))

    def before_step(step: int) -> None:
        guided.rule = rule_at(guide, step, total_steps)

    return guided, before_step


def _token_by_token(
    cfg: Config, guide: OffPolicyGuidanceConfig, engine: Engine, model: PreTrainedModel, rule: Rule
) -> SpeculativeEngine | TurnsEngine:
    if isinstance(engine, NativeEngine):
        return SpeculativeEngine(
            engine.model,
            model,
            rule,
            k=guide.k,
            max_overrides=guide.max_overrides,
            second_temperature=guide.temperature,
            max_slots=cfg.rollout.slots,
            max_context=cfg.longest,
            memory_share=engine.memory_share,
        )
    return TurnsEngine(
        engine,
        NativeEngine(model, max_slots=cfg.rollout.slots),
        rule,
        max_overrides=guide.max_overrides,
        second_temperature=guide.temperature,
        second_vocabulary=model.config.vocab_size,
    )


def load_guidance_model(cfg: Config, guide: OffPolicyGuidanceConfig, tokenizer: Any, device: str) -> PreTrainedModel:
    """Frozen, without the rows of padding that would let it write what the policy cannot read."""
    model = load_model(guide.model_path, guide.dtype or cfg.model.dtype, device, cfg.model.trust_remote_code)
    check_guidance_fits(cfg, guide, model.config, tokenizer)
    drop_padding_tokens(model, token_count(tokenizer))
    model.requires_grad_(False).eval()
    return model


def check_guidance_fits(cfg: Config, guide: OffPolicyGuidanceConfig, model_config: Any, tokenizer: Any) -> None:
    """It knows every token and takes the longest response."""
    if model_config.vocab_size < token_count(tokenizer):
        raise UserError(
            f"{SECTION}.model_path={guide.model_path} has {model_config.vocab_size} tokens, fewer than the tokenizer's "
            f"{token_count(tokenizer)}; guidance needs a model of the policy's own tokenizer"
        )
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest is not None and longest < cfg.longest:
        raise UserError(
            f"{SECTION}.model_path={guide.model_path} takes {longest} tokens, but data.max_prompt_tokens + "
            f"rollout.max_tokens = {cfg.longest}; lower one of them or take another guidance model"
        )


def rule_at(guide: OffPolicyGuidanceConfig, step: int, total_steps: int) -> Rule:
    return Rule(guide.rule, tau=guide.tau_at(step, total_steps), eps=guide.eps_at(step, total_steps))


def _check_alignable(guide: OffPolicyGuidanceConfig) -> None:
    """Aligning by position leaves no say to these: better refused than ignored."""
    if guide.max_overrides is not None or guide.temperature is not None:
        raise UserError(
            f"{SECTION}: max_overrides and temperature cannot be honoured by rule aligned, which takes "
            "whole texts of the guidance model; leave them out or choose another rule"
        )
