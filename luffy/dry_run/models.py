"""The models of a run without their weights, and a smoke test of the policy's class."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from luffy.config import Config
from luffy.errors import UserError
from luffy.learn.policy import Policy
from luffy.learn.teacher import check_tokenizer
from luffy.models.forward import use_luffy_attention
from luffy.models.load import (
    check_fits,
    check_quantization,
    check_same_tokenizer,
    load_tokenizer,
    model_folder,
    read_model_config,
)
from luffy.models.plain import choose_path
from luffy.rollout.native import NativeEngine
from luffy.train import setup
from luffy.train.weights import add_adapters
from luffy.types import Request, Sample, Sampling

POLICY = "model.path"
MOST_PARAMETERS = 50_000_000  # of a model that is tried as it is, if no smaller one can be made
PROMPT = (1, 2, 3)
# Sizes of a smaller model of the same class, by the names that configs have for them; then its width, which not every
# class lets be chosen.
SMALL = {
    "vocab_size": 64, "intermediate_size": 64, "ffn_dim": 64, "n_inner": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "max_position_embeddings": 64,
    "n_positions": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
NARROW = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "attention_hidden_size": 64,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_heads": 8,
    "lru_width": 64,
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """``trained`` of the ``parameters``; ``shares``: whether samples may share their prompt in the update;
    ``four_bit`` of them are quantized, at most ``largest`` in one matrix."""

    config: Any
    parameters: int
    trained: int
    shares: bool
    four_bit: int = 0
    largest: int = 0


def model_shape(cfg: Config, model: Any = None) -> ModelShape:
    """The shape of the policy, or of ``model`` (without weights) if one is given."""
    model = bare_model(cfg.model.path, POLICY, cfg) if model is None else model
    config, parameters, shares = model.config, parameters_of(model), True
    try:
        use_luffy_attention(model)
    except UserError:  # a model that luffy's attention does not serve runs by its own, slower
        shares = False
    sizes = matrix_sizes(model) if cfg.model.four_bits else [0]
    if cfg.model.lora is not None:
        with torch.device("meta"):
            model = add_adapters(model, cfg.model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return ModelShape(config, parameters, trained, shares, sum(sizes), max(sizes))


def matrix_sizes(model: Any) -> list[int]:
    """The sizes of linear layers' weights, without that of the vocabulary head."""
    head = model.get_output_embeddings()
    return [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head]


def bare_model(path: str, knob: str, cfg: Config) -> Any:
    """The model of a path without memory for its weights."""
    trust = cfg.model.trust_remote_code
    config = read_model_config(str(model_folder(path)), knob, trust)
    check_quantization(config, path, cfg.model.four_bits and knob == POLICY)
    return model_of_config(config, trust)


def model_of_config(config: Any, trust_remote_code: bool = False) -> Any:
    """A model without memory for its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model


def parameters_of(model: Any) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in model.parameters())


class OtherModels(NamedTuple):
    """Models beside the policy, without their weights: the one that overrides tokens, and a teacher with a folder of
    its own."""

    second: Any = None
    teacher: Any = None


def check_other_models(cfg: Config, method: str, tokenizer: Any) -> OtherModels:
    """Check that reference, second model and teacher are there and fit."""
    if method != "rl":
        return OtherModels()
    m, knobs, teacher = cfg.model, cfg.rollout.overrides, cfg.teacher.path
    if cfg.algorithm.kl_coef and m.reference not in (None, m.path):
        setup.check_reference(cfg, bare_model(m.reference, "model.reference", cfg).config, tokenizer)
    second_model = teacher_model = None
    if knobs is not None and not knobs.servers:
        second_model = bare_model(knobs.model_path, "rollout.offpolicy_guidance.model_path", cfg)
        check_same_tokenizer(tokenizer, load_tokenizer(knobs.model_path, m.trust_remote_code))
        named = f"rollout.offpolicy_guidance.model_path={knobs.model_path}"
        check_fits(named, second_model.config, tokenizer, cfg.longest)
    if teacher is not None and not cfg.teacher.is_self:
        teacher_model = bare_model(teacher, "teacher.path", cfg)
        check_tokenizer(cfg, tokenizer)
        check_fits(f"teacher.path={teacher}", teacher_model.config, tokenizer, cfg.longest)
    return OtherModels(second_model, teacher_model)


# ---- smoke test: one sampled token and one update of a small random model


def try_model(config: Any, cfg: Config) -> None:
    """Raise a UserError that says what a run with this model cannot do. ``config`` is the model's; nothing is tried if
    it gives no model that is small enough."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sizes in ({**SMALL, **NARROW}, SMALL, {}):
            model = _small_model(config, sizes, cfg.model.trust_remote_code)
            if model is not None and _passes(model, cfg, resized=bool(sizes)):
                return


def _small_model(config: Any, sizes: Mapping[str, int], trust_remote_code: bool) -> Any:
    """A model in evaluation mode, as a loaded one; None if the sizes do not go together or are too large."""
    build: Any = AutoModelForCausalLM.from_config
    with suppress(Exception):
        small = _resized(config, sizes)
        with torch.device("meta"):
            parameters = parameters_of(build(small, trust_remote_code=trust_remote_code))
        if parameters <= MOST_PARAMETERS:
            return build(small, trust_remote_code=trust_remote_code).float().eval()
    return None


def _passes(model: Any, cfg: Config, resized: bool) -> bool:
    """Whether the test succeeds. False if it fails by sizes, which another choice of them may fix."""
    named = f"model.path={cfg.model.path} ({type(model).__name__})"
    try:
        choose_path(model)
        _sample_a_token(model)
        _update_once(model, cfg)
    except UserError as error:
        raise UserError(f"{named} cannot be trained: {error}") from None
    except Exception as error:  # whatever a model of another making raises
        if resized and not isinstance(error, AttributeError | NotImplementedError | TypeError):
            return False
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{named} is not supported: a trial of one token and one update ended with {reason}") from error
    return True


def _resized(config: Any, sizes: Mapping[str, int]) -> Any:
    small = copy.deepcopy(config)
    for name, size in sizes.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(getattr(small, name), size))
    if sizes:
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(small, name, 0)
        with suppress(AttributeError, TypeError):  # some have none, others derive them
            small.layer_types = small.layer_types[: small.num_hidden_layers]
    return small


def _sample_a_token(model: nn.Module) -> None:
    (completion,) = NativeEngine(model, max_slots=1).generate([Request(PROMPT, 0, Sampling(2, 1.0, 1.0, 0, (0,)))])
    if not math.isfinite(float(completion.log_probs[0])):
        raise UserError("its first sampled token has no finite probability")


def _update_once(model: nn.Module, cfg: Config) -> None:
    plain = Config(model=replace(cfg.model, lora=None))  # the class is tried, not the run's loss
    ids, everywhere, nothing = torch.tensor([4, 5]), torch.ones(2), torch.zeros(2)
    sample = Sample(PROMPT, ids, nothing.to(torch.int8), everywhere, nothing, everywhere, nothing, nothing)
    norm = Policy(model, plain).update([sample], 0.0)["actor/grad_norm"].value
    if not norm > 0:
        raise UserError("its gradient is 0")
