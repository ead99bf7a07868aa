"""`luffy serve`: a vLLM server for the runs of a recipe, with the same model, context and engine arguments."""

from __future__ import annotations

import torch

from luffy.config import Config
from luffy.errors import ConfigError
from luffy.models.load import gguf_file
from luffy.rollout.vllm.serve import become_server, server_command, server_environment
from luffy.rollout.vllm.server import key_from
from luffy.train.dry_run import read_model_config
from luffy.train.engines import vllm_arguments


def serve(cfg: Config, host: str, port: int) -> None:
    """Does not return: this process becomes the server."""
    if gguf_file(cfg.model.path) is not None:
        raise ConfigError("'model.path' is a GGUF file; vLLM serves a Hugging Face folder (luffy prepare model)")
    v = cfg.rollout.vllm
    arguments = vllm_arguments(cfg, read_model_config(cfg.model.path, "model.path", cfg.model.trust_remote_code))
    transfer = v.transfer if v.transfer != "auto" else "nccl" if torch.cuda.is_available() else "folder"
    command = server_command(cfg.model.path, arguments, host, port, transfer)
    become_server(command, server_environment(key_from(v.api_key_env)))
