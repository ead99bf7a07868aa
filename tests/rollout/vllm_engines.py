"""vLLM engines for tests: started once for every shape of model, then given each test's weights."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

BLOCK = 32
ARGUMENTS = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "block_size": BLOCK}
ADAPTERS = {"enable_lora": True, "max_lora_rank": 8, "max_cpu_loras": 2}
KEY_VARIABLE = "LUFFY_VLLM_KEY"
_started: dict = {}


def colocated(model, slots=64):
    """``slots`` is left at 64: an engine cannot be given others without a start of its own."""
    from luffy.rollout.vllm.colocated import VllmEngine, engine_arguments

    shape = _shape(model)
    if shape not in _started:
        context = model.config.max_position_embeddings
        arguments = engine_arguments(
            dtype="float32", slots=64, max_context=context, width=1, memory_fraction=0.1, args=ARGUMENTS
        )
        _started[shape] = VllmEngine.of_policy(model, arguments)
    return _with_weights(_started[shape], model)


def remote(model, slots=64):
    """One server for the tiny Llama; other shapes are the colocated engine's to test."""
    from luffy.rollout.vllm.remote import RemoteEngine
    from luffy.rollout.vllm.transfer import FolderTransfer

    server = server_for(_llama())
    if _shape(model) != _shape(_llama()):
        pytest.skip("one server is enough, and it has another shape")
    if "remote" not in _started:
        folder = Path(_temporary("weights"))
        _started["remote"] = RemoteEngine(model, [server], FolderTransfer(folder), max_context=512, slots=16)
    return _with_weights(_started["remote"], model)


def colocated_adapters(model):
    """vLLM beside which adapters of ``model`` are pushed alone."""
    from luffy.rollout.vllm.colocated import VllmEngine, engine_arguments

    if "colocated_adapters" not in _started:
        arguments = engine_arguments(
            dtype="float32", slots=64, max_context=512, width=1, memory_fraction=0.1, args={**ARGUMENTS, **ADAPTERS}
        )
        _started["colocated_adapters"] = VllmEngine.of_policy(model, arguments, adapters_alone=True)
    return _with_weights(_started["colocated_adapters"], model)


def remote_adapters(model):
    """The same on a server."""
    from luffy.rollout.vllm.remote import RemoteEngine
    from luffy.rollout.vllm.transfer import AdapterTransfer

    settings = ["model.lora.rank=4", "rollout.vllm.adapters=alone"]
    server = server_for(_llama(), "adapters", settings)
    if "remote_adapters" not in _started:
        transfer = AdapterTransfer(Path(_temporary("adapters")))
        _started["remote_adapters"] = RemoteEngine(model, [server], transfer, max_context=512, slots=16)
    return _with_weights(_started["remote_adapters"], model)


def _with_weights(engine, model):
    engine.model = model
    engine.sync(0)
    return engine


def _shape(model) -> str:
    return json.dumps({k: str(v) for k, v in sorted(model.config.to_dict().items())})


def _llama():
    from builders import make_model

    return make_model("llama", hidden_size=128)


def _temporary(name: str) -> str:
    folder = tempfile.TemporaryDirectory(prefix=f"luffy-test-{name}-")
    atexit.register(folder.cleanup)
    return folder.name


# ---- servers


def save_with_tokenizer(model, folder: Path) -> None:
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    core = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w2", unk_token="w0").save_pretrained(folder)


def server_for(model, name: str = "first", settings=()):
    """A server that `luffy serve` started; stopped when the tests end."""
    if name not in _started:
        _started[name] = None  # a second try would take as long and fail as surely
        folder = Path(_temporary("served"))
        save_with_tokenizer(model, folder)
        _started[name] = start_server(folder, settings)
    assert _started[name] is not None, "the server did not start: see the first test that needed it"
    return _started[name][0]


def process_of(name: str):
    return _started[name][1]


def start_server(folder: Path, settings=()):
    """(client, process), once the server answers."""
    from luffy.rollout.vllm.http_client import Server, ServerLost
    from luffy.rollout.vllm.transfer import free_port

    key = os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))
    port = free_port("127.0.0.1")
    log = (folder / "server.log").open("w")
    overrides = [
        f"model.path={folder}", "data.max_prompt_tokens=312", "rollout.max_tokens=200", "rollout.slots=64",
        f"rollout.vllm.args={json.dumps(ARGUMENTS)}", *settings,
    ]  # fmt: skip
    (folder / "empty.yaml").write_text("")
    command = [sys.executable, "-c", "from luffy.cli import main; main()", "serve", str(folder / "empty.yaml")]
    process = subprocess.Popen([*command, *overrides, "--port", str(port)], stdout=log, stderr=log)
    atexit.register(stop, process)
    server = Server(f"http://127.0.0.1:{port}", key, timeout_s=120)
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            server.check_health()
            return server, process
        except ServerLost:
            time.sleep(0.5)
    raise RuntimeError("the server did not start: " + (folder / "server.log").read_text()[-3000:])


def stop(process) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
