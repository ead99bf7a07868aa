"""The device and the tokenizer of a run, and checks of what its config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from luffy.config import Config, ModelConfig
from luffy.config.parts import ENGINES
from luffy.core.shaping import SHAPES
from luffy.errors import ConfigError, UserError
from luffy.guidance.gate import find_gate
from luffy.guidance.ratios import SCHEDULES
from luffy.learn.credit import find_credit_function
from luffy.models.forward import max_positions, text_config
from luffy.models.load import check_fits, check_same_ids, load_tokenizer, model_folder, vocabulary_in


def load_policy_tokenizer(cfg: ModelConfig) -> Any:
    if not (cfg.tokenizer or cfg.path):
        raise ConfigError("'model.path' is empty; give a Hugging Face folder or hub id")
    return load_tokenizer(cfg.tokenizer or cfg.path, cfg.trust_remote_code)


def check_reference(cfg: Config, model_config: Any, tokenizer: Any) -> None:
    """Check that ``model.reference`` has the policy's token ids and takes the longest sample. A folder without a
    tokenizer is not checked for ids."""
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
    """Check that all parts that the config names exist and fit together; needs no model."""
    for knob in ("off_policy_reshape", "sft_reshape"):
        if ":" in (name := getattr(cfg.algorithm, knob)):
            SHAPES.find(name, f"algorithm.{knob}")
    if method == "sft":
        if cfg.guidance.trace_choice.part.needs_rewards:
            raise UserError(
                f"guidance.trace_choice={cfg.guidance.trace_choice} needs a verifier, which SFT does not run; choose "
                "another"
            )
        return
    lone_traces = [f"'batch.expert_share' ({cfg.batch.expert_share}) asks for"] * (cfg.batch.expert_share > 0)
    lone_traces += [f"'guidance.gate' ({cfg.guidance.gate}) leaves"] * cfg.guidance.gate.part.leaves_a_trace_alone
    if lone_traces and not find_credit_function(cfg.algorithm.credit).lone_traces:
        raise UserError(
            f"'algorithm.credit' ({cfg.algorithm.credit}) makes nothing of a group of a trace alone, which "
            f"{lone_traces[0]}; set algorithm.credit=lone_trace_sft"
        )
    _check_teacher(cfg)
    find_gate(cfg.guidance.gate)
    ENGINES.find(cfg.rollout.engine, "rollout.engine")
    SCHEDULES.find(cfg.guidance.strategy, "guidance.strategy")
    cfg.schedule(1).ratios(1, 0, "")


def _check_teacher(cfg: Config) -> None:
    """Check that there is a teacher if the credit function needs one, and only then."""
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
    """Check that prompt and response fit into the model's context."""
    longest = max_positions(model_config)
    fixed = longest >= (getattr(text_config(model_config), "max_position_embeddings", None) or longest)
    beyond = "" if fixed else ", beyond which its rotary frequencies (longrope) depend on the longest of a batch"
    budgets = {"rollout.max_tokens" if cfg.environment is None else "environment.max_tokens": cfg.longest_response}
    if cfg.data.eval is not None and cfg.eval.max_tokens is not None:
        budgets["eval.max_tokens"] = cfg.eval.max_tokens
    for name, budget in budgets.items():
        needed = cfg.data.max_prompt_tokens + budget
        if needed > longest:
            raise UserError(
                f"data.max_prompt_tokens + {name} = {needed} exceeds the model's context of {longest}{beyond}; "
                f"lower one of them"
            )
