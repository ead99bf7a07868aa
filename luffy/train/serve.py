"""`luffy serve`: a vLLM server for the runs of a recipe, with the same model, context and engine arguments."""

from __future__ import annotations

from luffy.config import Config
from luffy.errors import ConfigError
from luffy.models.load import gguf_file, read_model_config
from luffy.rollout.vllm.http_client import key_from
from luffy.rollout.vllm.server_process import become_server, server_command, server_environment
from luffy.train.setup import pick_device
from luffy.train.vllm_settings import transfer_to_servers, vllm_arguments


def serve(cfg: Config, host: str, port: int) -> None:
    """Does not return: this process becomes the server."""
    if gguf_file(cfg.model.path) is not None:
        raise ConfigError("'model.path' is a GGUF file; vLLM serves a Hugging Face folder (luffy prepare model)")
    arguments = vllm_arguments(cfg, read_model_config(cfg.model.path, "model.path", cfg.model.trust_remote_code))
    transfer = transfer_to_servers(cfg, pick_device("auto"))
    command = server_command(cfg.model.path, arguments, host, port, transfer)
    become_server(command, server_environment(key_from(cfg.rollout.vllm.api_key_env)))
