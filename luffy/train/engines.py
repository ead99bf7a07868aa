"""From a config to the engine that makes the responses of a run (docs/engines.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from luffy.config import Config
from luffy.config.checks import ENGINE_NAMES
from luffy.errors import ConfigError, UserError
from luffy.models.forward import causal_lm
from luffy.registry import Registry
from luffy.rollout.engine import Engine
from luffy.rollout.native import NativeEngine
from luffy.rollout.vllm.colocated import VllmEngine, engine_arguments
from luffy.rollout.vllm.http_client import Server, key_from
from luffy.rollout.vllm.remote import RemoteEngine
from luffy.rollout.vllm.transfer import FolderTransfer, NcclTransfer, Transfer

VLLM_SLOTS = 256  # unless rollout.slots says otherwise: vLLM's own default


EngineBuilder = Callable[[Config, nn.Module, str, Callable[[str], None]], Engine]
ENGINES: Registry[EngineBuilder] = Registry("engine")


def engine(name: str) -> Callable[[EngineBuilder], EngineBuilder]:
    """A decorator that registers ``build(cfg, model, device, warn) -> Engine`` for ``rollout.engine``.

    ``model`` is the policy on ``device``; ``warn`` takes a line for the user. ``sync`` of the engine is called before
    its first ``generate``.
    """
    ENGINE_NAMES.add(name)
    return ENGINES.register(name)


def find_engine(name: str) -> EngineBuilder:
    try:
        return ENGINES[name]
    except UserError as error:
        raise UserError(f"'rollout.engine': {error}") from None


def build_engine(cfg: Config, model: nn.Module, device: str, warn: Callable[[str], None]) -> Engine:
    """The policy's engine, by its name."""
    return find_engine(cfg.rollout.engine)(cfg, model, device, warn)


@engine("native")
def build_native(cfg: Config, model: nn.Module, device: str, warn: Callable[[str], None]) -> Engine:
    return NativeEngine(model, max_slots=cfg.rollout.slots)


@engine("vllm")
def build_vllm(cfg: Config, model: nn.Module, device: str, warn: Callable[[str], None]) -> Engine:
    """It has no weights before its first ``sync``."""
    if cfg.rollout.vllm.servers:
        return remote_engine(cfg, model, device, warn)
    folder = weight_folder(cfg) if transfer_of(cfg, device) == "folder" else None
    arguments = vllm_arguments(cfg, causal_lm(model).config)
    return VllmEngine.of_policy(model, arguments, push_folder=folder, seeded=cfg.rollout.vllm.request_seeds)


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
    limit = getattr(model_config, "max_position_embeddings", None) or needed
    return min(wanted or needed, limit)


def transfer_of(cfg: Config, device: str) -> str:
    v = cfg.rollout.vllm
    if v.servers:
        return transfer_to_servers(cfg, device)
    if v.transfer != "auto":
        return v.transfer
    spread = v.tensor_parallel_size > 1 or v.args.get("pipeline_parallel_size", 1) > 1
    return "folder" if spread else "memory"


def transfer_to_servers(cfg: Config, device: str) -> str:
    """What both ends choose, each for itself: the trainer and the server."""
    v = cfg.rollout.vllm
    if v.transfer != "auto":
        return v.transfer
    return "nccl" if device == "cuda" else "folder"


def weight_folder(cfg: Config) -> Path:
    return Path(cfg.rollout.vllm.shared_folder or cfg.folder / "weights")


def remote_engine(cfg: Config, model: nn.Module, device: str, warn: Callable[[str], None]) -> RemoteEngine:
    v = cfg.rollout.vllm
    key = key_from(v.api_key_env)
    transfer: Transfer
    if transfer_of(cfg, device) == "nccl":
        transfer = NcclTransfer(v.nccl_host)
    else:
        transfer = FolderTransfer(weight_folder(cfg))
    return RemoteEngine(
        model,
        [Server(url, key, v.timeout_s) for url in v.servers],
        transfer,
        max_context=context_of(cfg, causal_lm(model).config),
        slots=cfg.rollout.slots or VLLM_SLOTS,
        seeded=v.request_seeds,
        warn=warn,
    )
