"""The engine that rolls out: the policy alone, or with a guidance model beside it (docs/guidance.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from luffy.config import Config, OffPolicyGuidanceConfig
from luffy.core.importance import Importance
from luffy.core.rules import Rule
from luffy.errors import UserError
from luffy.models.load import load_model, load_tokenizer
from luffy.rollout.aligned import AlignedEngine
from luffy.rollout.engine import Engine
from luffy.rollout.native import NativeEngine
from luffy.rollout.speculative import SpeculativeEngine, check_same_tokenizer

BeforeStep = Callable[[int], None]


def build_rollout_engine(
    cfg: Config, native: NativeEngine, tokenizer: Any, device: str, total_steps: int
) -> tuple[Engine, BeforeStep]:
    """The engine, and what to call before each step so that its schedule moves."""
    guide = cfg.rollout.guide
    if guide is None:
        return native, lambda step: None
    check_same_tokenizer(tokenizer, load_tokenizer(guide.model_path, cfg.model.trust_remote_code))
    model: nn.Module = load_model(guide.model_path, guide.dtype or cfg.model.dtype, device, cfg.model.trust_remote_code)
    model.requires_grad_(False).eval()
    if guide.rule == "aligned":
        _check_alignable(guide)
        return AlignedEngine(native, NativeEngine(model, max_slots=cfg.rollout.slots)), lambda step: None
    engine = SpeculativeEngine(
        native.model,
        model,
        rule_at(guide, 0, total_steps),
        k=guide.k,
        max_overrides=guide.max_overrides,
        guidance_temperature=guide.temperature,
        max_slots=cfg.rollout.slots,
        max_context=cfg.data.max_prompt_tokens + cfg.rollout.max_tokens,
    )

    def before_step(step: int) -> None:
        engine.rule = rule_at(guide, step, total_steps)

    return engine, before_step


def rule_at(guide: OffPolicyGuidanceConfig, step: int, total_steps: int) -> Rule:
    return Rule(guide.rule, tau=guide.tau, eps=guide.eps_at(step, total_steps))


def _check_alignable(guide: OffPolicyGuidanceConfig) -> None:
    """Aligning by position leaves no say to these: better refused than ignored."""
    if guide.max_overrides is not None or guide.temperature is not None:
        raise UserError(
            "rollout.offpolicy_guidance: max_overrides and temperature cannot be honoured by rule aligned, which takes "
            "whole texts of the guidance model; leave them out or choose another rule"
        )


def importance_of(cfg: Config) -> Importance | None:
    """None without guidance: then no weight is computed at all."""
    if cfg.rollout.guide is None:
        return None
    a = cfg.algorithm
    return Importance(
        clamp_min=a.importance_clamp_min,
        clamp_max=a.importance_clamp_max,
        detach=a.importance_detach,
        literal=a.importance_objective == "literal",
        level=a.importance_level,
    )
