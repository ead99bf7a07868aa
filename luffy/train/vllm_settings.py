"""Settings of `rollout.vllm` as vLLM's engine arguments, context and weight transfer; `luffy serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from luffy.config import Config
from luffy.errors import ConfigError
from luffy.models.forward import max_positions
from luffy.models.load import gguf_file, read_model_config
from luffy.models.machine import pick_device
from luffy.rollout.vllm.colocated import engine_arguments
from luffy.rollout.vllm.http_client import VLLM_SLOTS, key_from
from luffy.rollout.vllm.server_process import become_server, server_command, server_environment


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
    """Tokens of the longest prompt and response of the run, or `rollout.vllm.max_context`."""
    longest = max(cfg.longest_response, cfg.eval.max_tokens or 0)
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
    """How weights reach a server; the trainer and the server each derive it from the config."""
    v = cfg.rollout.vllm
    if v.transfer != "auto":
        return v.transfer
    return "nccl" if device == "cuda" else "folder"


def weight_folder(cfg: Config) -> Path:
    return Path(cfg.rollout.vllm.shared_folder or cfg.folder / "weights")


def serve(cfg: Config, host: str, port: int) -> None:
    """Become a vLLM server for the runs of a config: same model, context and engine arguments. Does not return."""
    if gguf_file(cfg.model.path) is not None:
        raise ConfigError("'model.path' is a GGUF file; vLLM serves a Hugging Face folder (luffy prepare model)")
    arguments = vllm_arguments(cfg, read_model_config(cfg.model.path, "model.path", cfg.model.trust_remote_code))
    transfer = transfer_to_servers(cfg, pick_device("auto"))
    command = server_command(cfg.model.path, arguments, host, port, transfer)
    become_server(command, server_environment(key_from(cfg.rollout.vllm.api_key_env)))
