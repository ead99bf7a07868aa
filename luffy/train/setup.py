"""From a config to the device and the model of a run, and the checks of what it names (its problems: tasks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from luffy.config import Config, ModelConfig
from luffy.core.shaping import SHAPES
from luffy.errors import ConfigError, UserError, how_to_install
from luffy.guidance.gate import find_gate
from luffy.guidance.ratios import SCHEDULES
from luffy.models.forward import max_positions, text_config
from luffy.models.generation_config import make_savable
from luffy.models.load import load_model, load_tokenizer, model_folder, vocabulary_in
from luffy.models.same_tokens import check_fits, check_same_ids
from luffy.train.build_engines import ENGINES
from luffy.train.credit import find_credit_function


def pick_device(wanted: str) -> str:
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {wanted!r} is unknown: use auto, cpu or cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("'model.device' is cuda but torch sees no GPU; set model.device=cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def load_policy(cfg: ModelConfig, device: str) -> nn.Module:
    """The model to train, with fresh adapters when LoRA is on."""
    if not cfg.path:
        raise ConfigError("'model.path' is empty; give a Hugging Face folder or hub id")
    model: nn.Module = load_model(cfg.path, cfg.dtype, device, cfg.trust_remote_code)
    make_savable(model, cfg.path)
    return model if cfg.lora is None else add_adapters(model, cfg)


def add_adapters(model: nn.Module, cfg: ModelConfig) -> nn.Module:
    try:
        import peft
    except ImportError:
        raise ConfigError(f"'model.lora' needs peft; install it with: {how_to_install('peft')}") from None
    assert cfg.lora is not None
    lora = cfg.lora
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"'model.lora': {error}") from None
    _check_tied(adapted)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # adapters learn in float32 whatever the base's dtype
            parameter.data = parameter.data.float()
    return adapted


def _check_tied(adapted: nn.Module) -> None:
    """Merged into a weight that two modules share, an adapter of one would change the other as well."""
    weights: dict[int, list[str]] = {}
    for name, module in adapted.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and not list(module.children()):
            weights.setdefault(id(weight), []).append(name)
    for names in weights.values():
        adapter = next((name for name in names if name.endswith(".base_layer")), None)
        if adapter is not None and len(names) > 1:
            other = next(name for name in names if name != adapter)
            raise ConfigError(
                f"'model.lora.target_modules' adapts {adapter.removesuffix('.base_layer')}, whose weight is tied to "
                f"{other}: leave it out"
            )


def load_policy_tokenizer(cfg: ModelConfig) -> Any:
    if not (cfg.tokenizer or cfg.path):
        raise ConfigError("'model.path' is empty; give a Hugging Face folder or hub id")
    return load_tokenizer(cfg.tokenizer or cfg.path, cfg.trust_remote_code)


def check_reference(cfg: Config, model_config: Any, tokenizer: Any) -> None:
    """``model.reference`` must mean the same by every token id as the policy, know them all and take the longest
    sample. A folder without a tokenizer is taken at its word."""
    path = str(model_folder(cfg.model.reference or ""))
    if not Path(path).is_dir() or (Path(path) / "tokenizer_config.json").exists():
        theirs = load_tokenizer(path, cfg.model.trust_remote_code)
        check_same_ids(tokenizer, theirs, f"reference (model.reference={cfg.model.reference})")
    known = vocabulary_in(cfg.model.path, cfg.model.trust_remote_code)
    check_fits(f"model.reference={cfg.model.reference}", model_config, tokenizer, cfg.longest, known)


def dropout_notice(model_config: Any) -> list[str]:
    """One line when the model's config asks for dropout or router noise, which an RL update would run with."""
    found = [
        f"{name}={value}"
        for name, value in sorted(text_config(model_config).to_dict().items())
        if ("drop" in name or "jitter" in name)
        and not name.startswith(("classifier", "summary"))  # of heads that a causal LM does not have
        and isinstance(value, float)
        and value > 0
    ]
    if not found:
        return []
    return [
        f"the model has {', '.join(found)}: updates run with it, so their log-probs differ from those of the rollouts "
        "(rollout/logprob_diff_*); set it to 0 in its config.json"
    ]


def check_names(cfg: Config, method: str) -> None:
    """What the config chooses by name is there, and goes together; a UserError says what is not. Needs no model."""
    for knob in ("off_policy_reshape", "sft_reshape"):
        if ":" in (name := getattr(cfg.algorithm, knob)):
            SHAPES.find(name, f"algorithm.{knob}")
    if method == "sft":
        if cfg.guidance.trace_choice == "best_reward":
            raise UserError(
                "guidance.trace_choice=best_reward needs a verifier, which SFT does not run; choose another"
            )
        return
    lone_traces = [f"'batch.expert_share' ({cfg.batch.expert_share}) asks for"] * (cfg.batch.expert_share > 0)
    lone_traces += ["'guidance.gate' (trace_alone) leaves"] * (cfg.guidance.gate == "trace_alone")
    if lone_traces and not find_credit_function(cfg.algorithm.credit).lone_traces:
        raise UserError(
            f"'algorithm.credit' ({cfg.algorithm.credit}) makes nothing of a group of a trace alone, which "
            f"{lone_traces[0]}; set algorithm.credit=lone_trace_sft"
        )
    _check_teacher(cfg)
    find_gate(cfg.guidance.gate)
    ENGINES.find(cfg.rollout.engine, "rollout.engine")
    if cfg.guidance.strategy != "fixed":
        SCHEDULES.find(cfg.guidance.strategy, "guidance.strategy")
    cfg.schedule(1).ratios(1, 0, "")


def _check_teacher(cfg: Config) -> None:
    """There is a teacher if the credit function asks for one, and only then."""
    credit = cfg.algorithm.credit
    needed = "teacher" in find_credit_function(credit).needs
    if needed and not cfg.teacher.is_there:
        raise UserError(f"algorithm.credit={credit} needs a teacher: set teacher.path to a model's folder, or to self")
    if not needed and cfg.teacher.is_there:
        raise UserError(
            f"the teacher (teacher.path, teacher.servers) is not used by algorithm.credit={credit}; set "
            f"algorithm.credit=distill, or leave it out"
        )


def check_context(cfg: Config, model_config: Any) -> None:
    """Prompt and response fit into the model's context."""
    longest = max_positions(model_config)
    fixed = longest >= (getattr(text_config(model_config), "max_position_embeddings", None) or longest)
    beyond = "" if fixed else ", beyond which its rotary frequencies (longrope) depend on the longest of a batch"
    budgets = {"rollout.max_tokens": cfg.rollout.max_tokens}
    if cfg.data.eval is not None and cfg.eval.max_tokens is not None:
        budgets["eval.max_tokens"] = cfg.eval.max_tokens
    for name, budget in budgets.items():
        needed = cfg.data.max_prompt_tokens + budget
        if needed > longest:
            raise UserError(
                f"data.max_prompt_tokens + {name} = {needed} exceeds the model's context of {longest}{beyond}; "
                f"lower one of them"
            )
