"""The model under evaluation behind the engine protocol: the native engine, vLLM, or anybody's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig

from luffy.conversations import Conversations
from luffy.errors import UserError
from luffy.models.forward import text_config
from luffy.models.load import eos_ids, eos_ids_in, gguf_file, load_model, load_tokenizer
from luffy.models.machine import pick_device, use_threads
from luffy.registry import resolve
from luffy.rollout.engine import Engine
from luffy.rollout.native import NativeEngine
from luffy.rollout.native.native_engine import GPU_SLOTS
from luffy.rollout.vllm.colocated import VllmEngine, engine_arguments

VLLM_MEMORY_FRACTION = 0.9  # nothing else needs the GPU here
CPU_SLOTS = 64  # each keeps keys and values for the longest response
VLLM_SLOTS = 256
MODEL_FILES = (".safetensors", ".json", ".jinja", ".gguf", ".model", ".txt")  # a change of one is another model


@dataclass(frozen=True)
class LoadedModel:
    """An engine with what a prompt needs to know of its model. ``context`` counts prompt and response;
    ``conversations``: what episodes with an environment are played with."""

    engine: Engine
    tokenizer: Any
    eos_ids: tuple[int, ...]
    context: int
    conversations: Conversations | None = None


def default_slots(engine: str, device: str) -> int:
    """Responses at the same time. The native engine on a GPU takes memory page by page, so that its most is no promise
    to have memory for all of them."""
    if engine == "vllm":
        return VLLM_SLOTS
    return GPU_SLOTS if device == "cuda" else CPU_SLOTS


def load_engine(
    name: str, model: str, *, dtype: str, device: str, slots: int, trust_remote_code: bool = False
) -> LoadedModel:
    """``native``, ``vllm``, or ``module:function`` called as ``function(model, dtype=, device=, slots=)``, with
    ``trust_remote_code=True`` too where that is set."""
    if name == "native":
        return load_native(model, dtype=dtype, device=device, slots=slots, trust_remote_code=trust_remote_code)
    if name == "vllm":
        return load_vllm(model, dtype=dtype, slots=slots, trust_remote_code=trust_remote_code)
    if ":" not in name:
        raise UserError(f"--engine {name} is unknown: use native, vllm, or module:function that returns a LoadedModel")
    trust = {"trust_remote_code": trust_remote_code} if trust_remote_code else {}
    loaded = resolve(name)(model, dtype=dtype, device=device, slots=slots, **trust)
    if not isinstance(loaded, LoadedModel):
        raise UserError(f"--engine {name} must return a luffy.evaluation.engines.LoadedModel, found {type(loaded)}")
    return loaded


def load_native(
    model: str, *, dtype: str, device: str, slots: int | None = None, trust_remote_code: bool = False
) -> LoadedModel:
    tokenizer = load_tokenizer(model, trust_remote_code)
    use_threads(None)
    policy = load_model(model, cast(Any, dtype), pick_device(device), trust_remote_code)
    engine = NativeEngine(policy, max_slots=slots)
    return LoadedModel(engine, tokenizer, eos_ids(policy, tokenizer), engine.max_context)


def load_vllm(model: str, *, dtype: str, slots: int, trust_remote_code: bool = False) -> LoadedModel:
    """vLLM with the weights of a folder or hub id, which it reads itself, and the GPU to itself."""
    if gguf_file(model) is not None:
        raise UserError(f"--engine vllm: {model} is a GGUF file; give a Hugging Face folder (luffy prepare model)")
    tokenizer = load_tokenizer(model, trust_remote_code)
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    arguments = engine_arguments(
        dtype=dtype, slots=slots, max_context=None, width=1, memory_fraction=VLLM_MEMORY_FRACTION,
        args={"trust_remote_code": trust_remote_code},
    )  # fmt: skip
    engine = VllmEngine({"model": model, **arguments}, vocabulary=text_config(config).vocab_size)
    return LoadedModel(engine, tokenizer, eos_ids_in(model, tokenizer, trust_remote_code), engine.max_context)


def model_identity(model: str) -> str:
    """Changes when the weights do: a hash of a local model's files. A hub id stands for itself."""
    path = Path(model)
    if not path.exists():
        return f"hub:{model}"
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file() and f.suffix in MODEL_FILES)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"{file.name}:{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()}"
