"""The knobs of `rollout.vllm` as vLLM's engine arguments, context, and way of weight transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from luffy.config import Config
from luffy.errors import ConfigError
from luffy.models.forward import max_positions
from luffy.rollout.vllm.colocated import engine_arguments

VLLM_SLOTS = 256  # unless rollout.slots says otherwise: vLLM's own default


def vllm_arguments(cfg: Config, model_config: Any) -> dict[str, Any]:
    v = cfg.rollout.vllm
    return engine_arguments(
        dtype=cfg.model.dtype,
        slots=cfg.rollout.slots or VLLM_SLOTS,
        max_context=context_of(cfg, model_config),
        width=v.tensor_parallel_size,
        memory_fraction=v.memory_fraction,
        args={"trust_remote_code": cfg.model.trust_remote_code, **v.args},
    )


def context_of(cfg: Config, model_config: Any) -> int:
    """The longest prompt and response that the run can ask for, or what the user said."""
    longest = max(cfg.rollout.max_tokens, cfg.eval.max_tokens or 0)
    needed = cfg.data.max_prompt_tokens + longest
    wanted = cfg.rollout.vllm.max_context
    if wanted is not None and wanted < needed:
        raise ConfigError(
            f"'rollout.vllm.max_context' ({wanted}) is less than data.max_prompt_tokens + the longest response "
            f"({needed}); raise it"
        )
    return min(wanted or needed, max_positions(model_config))


def transfer_of(cfg: Config, device: str) -> str:
    v = cfg.rollout.vllm
    if v.servers:
        return transfer_to_servers(cfg, device)
    if v.transfer != "auto":
        return v.transfer
    spread = v.tensor_parallel_size > 1 or v.args.get("pipeline_parallel_size", 1) > 1
    return "folder" if spread or cfg.parallel.rollout_group > 1 else "memory"


def transfer_to_servers(cfg: Config, device: str) -> str:
    """What both ends choose, each for itself: the trainer and the server."""
    v = cfg.rollout.vllm
    if v.transfer != "auto":
        return v.transfer
    return "nccl" if device == "cuda" else "folder"


def weight_folder(cfg: Config) -> Path:
    return Path(cfg.rollout.vllm.shared_folder or cfg.folder / "weights")
