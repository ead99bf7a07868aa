"""The models of a run without their weights: their shapes, whether they are there, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from luffy.config import Config
from luffy.errors import UserError
from luffy.models.forward import use_luffy_attention
from luffy.models.load import load_tokenizer, model_folder, read_model_config
from luffy.models.same_tokens import check_fits, check_same_tokenizer
from luffy.train import setup
from luffy.train.run_state import Method
from luffy.train.teacher import check_tokenizer


@dataclass(frozen=True)
class ModelShape:
    """``trained`` of the ``parameters``; ``shares``: whether samples may share their prompt in the update."""

    config: Any
    parameters: int
    trained: int
    shares: bool


def model_shape(cfg: Config, model: Any = None) -> ModelShape:
    """The shape of the policy; of ``model``, without weights, where one is given."""
    model = bare_model(cfg.model.path, "model.path", cfg) if model is None else model
    config, parameters, shares = model.config, parameters_of(model), True
    try:
        use_luffy_attention(model)
    except UserError:  # a model that luffy's attention does not serve runs by its own, slower
        shares = False
    if cfg.model.lora is not None:
        with torch.device("meta"):
            model = setup.add_adapters(model, cfg.model)
    return ModelShape(config, parameters, sum(p.numel() for p in model.parameters() if p.requires_grad), shares)


def bare_model(path: str, knob: str, cfg: Config) -> Any:
    """Without memory for its weights."""
    trust = cfg.model.trust_remote_code
    return model_of_config(read_model_config(str(model_folder(path)), knob, trust), trust)


def model_of_config(config: Any, trust_remote_code: bool = False) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model


def parameters_of(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


class OtherModels(NamedTuple):
    """Models beside the policy, without their weights: the one that overrides tokens, and the teacher where it is
    loaded from its own folder."""

    second: Any = None
    teacher: Any = None


def check_other_models(cfg: Config, method: Method, tokenizer: Any) -> OtherModels:
    """The reference, the second model and the teacher are there and fit."""
    m = cfg.model
    if method != "rl":
        return OtherModels()
    if cfg.algorithm.kl_coef and m.reference not in (None, m.path):
        reference = bare_model(m.reference, "model.reference", cfg)
        setup.check_reference(cfg, reference.config, tokenizer)
    return OtherModels(_second_model(cfg, tokenizer), _teacher_model(cfg, tokenizer))


def _second_model(cfg: Config, tokenizer: Any) -> Any:
    knobs = cfg.rollout.overrides
    if knobs is None or knobs.servers:
        return None
    model = bare_model(knobs.model_path, "rollout.offpolicy_guidance.model_path", cfg)
    check_same_tokenizer(tokenizer, load_tokenizer(knobs.model_path, cfg.model.trust_remote_code))
    check_fits(f"rollout.offpolicy_guidance.model_path={knobs.model_path}", model.config, tokenizer, cfg.longest)
    return model


def _teacher_model(cfg: Config, tokenizer: Any) -> Any:
    path = cfg.teacher.path
    if path is None or cfg.teacher.is_self:
        return None
    model = bare_model(path, "teacher.path", cfg)
    check_tokenizer(cfg, tokenizer)
    check_fits(f"teacher.path={path}", model.config, tokenizer, cfg.longest)
    return model
