"""Servers that luffy starts: what their command says, and who may speak to them."""

import asyncio
import os
import subprocess
import sys

import pytest

from luffy.config import Config
from luffy.errors import UserError
from luffy.rollout.vllm.colocated import environment, worker_environment
from luffy.rollout.vllm.guard import RequireKey
from luffy.rollout.vllm.server_process import flags, server_command, server_environment
from luffy.schema import build
from luffy.train.build_engines import serve

KEY = "the-servers-own-key"


def test_arguments_become_flags():
    given = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 8, "seed": None}
    given |= {"compilation_config": {"mode": 0}, "served_model_name": ["a", "b"]}
    assert list(flags(given)) == [
        "--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs", "8",
        "--compilation-config", '{"mode": 0}', "--served-model-name", "a", "b",
    ]  # fmt: skip


def test_a_server_listens_on_loopback_and_takes_its_key_from_the_environment(tiny_model, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    started = []
    monkeypatch.setattr("luffy.train.build_engines.become_server", lambda *given: started.append(given))
    cfg = build(
        Config,
        {
            "model": {"path": str(tiny_model)},
            "data": {"max_prompt_tokens": 20},
            "rollout": {
                "max_tokens": 50,
                "slots": 7,
                "vllm": {"api_key_env": "MY_KEY", "tensor_parallel_size": 2, "args": {"enforce_eager": True}},
            },
        },
    )
    serve(cfg, "127.0.0.1", 8123)
    ((command, environment),) = started
    line = " ".join(command)
    for part in (
        "--host 127.0.0.1", "--port 8123", "--max-model-len 70", "--max-num-seqs 7", "--tensor-parallel-size 2",
        "--enforce-eager", "--logprobs-mode processed_logprobs", "--generation-config vllm",
        "--middleware luffy.rollout.vllm.guard.RequireKey",
        "--worker-extension-cls luffy.rollout.vllm.worker_extension.LuffyWorker", f"--model {tiny_model}",
    ):  # fmt: skip
        assert part in line, part
    assert KEY not in line and "api-key" not in line
    assert environment["VLLM_API_KEY"] == KEY and environment["VLLM_SERVER_DEV_MODE"] == "1"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UserError, match="MY_KEY.*is empty"):
        serve(cfg, "127.0.0.1", 8123)


def test_nccl_servers_are_started_for_it():
    assert "weight-transfer-config" not in " ".join(server_command("m", {}, "127.0.0.1", 1, "folder"))
    assert '--weight-transfer-config {"backend": "nccl"}' in " ".join(server_command("m", {}, "127.0.0.1", 1, "nccl"))
    assert server_environment(KEY)["VLLM_NO_USAGE_STATS"] == "1"


def test_vllm_takes_no_module_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secrets.py").write_text("print('mine')")
    command = server_command("m", {}, "127.0.0.1", 1, "folder")
    command[command.index("-m") :] = ["-m", "secrets"]
    spawned = [sys.executable, "-c", "import secrets"]  # as vLLM starts its workers
    assert subprocess.check_output(command) == b""
    with environment(**worker_environment(None)):
        assert subprocess.check_output(spawned) == b""
    assert subprocess.check_output(spawned) == b"mine\n" and "PYTHONSAFEPATH" not in os.environ


def ask_server(path, header=None, kind="http"):
    """The status that the guard answers with, or 200 when it lets the request through."""
    sent, passed = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", header.encode())] if header else []
    scope = {"type": kind, "path": path, "headers": headers}
    asyncio.run(RequireKey(app)(scope, None, send))
    if passed:
        return 200
    return sent[0].get("status", sent[0].get("code"))


def test_the_guard_asks_for_the_key_on_every_route_but_health(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    for path in ("/v1/completions", "/collective_rpc", "/update_weights", "/sleep", "/metrics", "/health/x", "/docs"):
        assert ask_server(path) == 401
        assert ask_server(path, "Bearer wrong") == 401 and ask_server(path, KEY) == 401
        assert ask_server(path, f"Bearer {KEY}") == 200
    assert ask_server("/health") == 200
    assert ask_server("/v1/realtime", kind="websocket") == 1008
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is empty"):
        RequireKey(None)
