"""Models and tokenizers from a folder, a hub id or a GGUF file; whatever is wrong is one clear line."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from luffy.errors import UserError
from luffy.hub import hub_fault
from luffy.models.forward import causal_lm
from luffy.models.plain import choose_path

disable_progress_bar()  # its bars for loading and saving would tear a run's own view apart

# What `transformers` and the readers below it raise for absent, damaged or foreign files.
LOAD_ERRORS = (OSError, ValueError, LookupError, RuntimeError, ImportError, SafetensorError, struct.error)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DtypeName = Literal["float32", "bfloat16"]


def load_model(
    path: str | Path, dtype: DtypeName = "float32", device: str = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal LM, ready to train and to generate: safetensors or GGUF weights, never pickles."""
    if dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is unknown: use {' or '.join(DTYPES)}")
    gguf = gguf_file(path)
    model = _load_gguf(gguf) if gguf else _load_safetensors(path, DTYPES[dtype], trust_remote_code)
    for parameter in model.parameters():
        # Parameters only: rotary frequencies are buffers, and rounding them turns far positions by whole radians.
        parameter.data = parameter.data.to(DTYPES[dtype])
    nn.Module.to(model, device=torch.device(device))
    choose_path(model)
    return model


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer that lies beside the weights."""
    gguf = gguf_file(path)
    if gguf is None:
        check_local(path, "tokenizer_config.json")
        return _guarded(AutoTokenizer.from_pretrained, path, str(path), trust_remote_code=trust_remote_code)
    return _guarded(AutoTokenizer.from_pretrained, gguf, str(gguf.parent), gguf_file=gguf.name)


def decode(tokenizer: Any, responses: Sequence[Any]) -> list[str]:
    """The text of each response's token ids, without special tokens. (For no responses some versions of
    `transformers` give one empty text.)"""
    return tokenizer.batch_decode(responses, skip_special_tokens=True) if responses else []


def token_count(tokenizer: Any) -> int:
    """Ids a tokenizer can give, from 0 on; a model often has more rows, of padding."""
    return 1 + max(tokenizer.get_vocab().values())


def drop_padding_tokens(model: PreTrainedModel, tokens: int) -> None:
    """Cut embeddings and head to the first ``tokens`` rows: a distribution over them alone, renormalised."""
    if model.config.vocab_size > tokens:
        model.resize_token_embeddings(tokens)


def eos_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every token id that ends a response: those of the generation config, then the tokenizer's own."""
    return eos_ids_of(causal_lm(model).generation_config, tokenizer)


def eos_ids_of(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    listed = getattr(generation_config, "eos_token_id", None)
    ids = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError(
            "no end-of-sequence token: set eos_token_id in generation_config.json or eos_token in the tokenizer"
        )
    return tuple(dict.fromkeys(ids))


def _load_safetensors(path: str | Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    check_local(path, "config.json")
    _check_no_pickles(path)
    model: PreTrainedModel
    model, info = _guarded(
        AutoModelForCausalLM.from_pretrained,
        path,
        str(path),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    _check_complete(path, info)
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"{path}: quantized weights cannot be trained; load the unquantized model")
    return model


def _load_gguf(file: Path) -> PreTrainedModel:
    """De-quantized weights in a fresh model. `transformers` marks the one it reads as quantized, and
    such a model refuses to be saved."""
    loaded, info = _guarded(
        AutoModelForCausalLM.from_pretrained,
        file,
        str(file.parent),
        gguf_file=file.name,
        dtype=torch.float32,
        output_loading_info=True,
    )
    _check_complete(file, info)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: PreTrainedModel = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    nn.Module.eval(model)
    return model


def gguf_file(path: str | Path) -> Path | None:
    """The GGUF file meant by ``path``: itself, or the only weights of a folder."""
    local = Path(path)
    if local.suffix == ".gguf":
        if not local.is_file():
            raise UserError(f"{local}: no such file")
        return local
    if not local.is_dir() or (local / "config.json").exists():
        return None
    files = sorted(local.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{local} holds {len(files)} GGUF files: name the one to load, e.g. {files[0]}")
    return files[0] if files else None


def check_local(path: str | Path, needed: str) -> None:
    """A path that is plainly local must exist; otherwise it may be a hub id, and the hub is asked if it is there."""
    local = Path(path)
    looks_local = local.is_absolute() or str(path).startswith(("./", "../", "~")) or len(local.parts) > 2
    if not local.exists() and looks_local:
        raise UserError(f"{path}: no such folder")
    if local.is_file():
        raise UserError(f"{path} is a file: give a folder in Hugging Face format, a hub id or a .gguf file")
    if local.is_dir() and not (local / needed).exists():
        raise UserError(f"{path} has no {needed}: {_what_it_is(local, needed)}")
    if not local.exists():
        hub_fault()


def _what_it_is(folder: Path, needed: str) -> str:
    latest = folder / "checkpoints" / "latest" / "model"
    if latest.is_dir():
        return f"a run folder; its newest model is {latest}"
    if (folder / "adapter_config.json").exists():
        return f"LoRA adapters alone; {folder.parent / 'model'} has them merged into the model"
    if needed == "tokenizer_config.json" and (folder / "config.json").exists():
        return "a model without its tokenizer; say where that is (model.tokenizer=FOLDER)"
    return "not a model folder in Hugging Face format"


def _check_no_pickles(path: str | Path) -> None:
    local = Path(path)
    if not local.is_dir() or any(local.glob("*.safetensors")):
        return
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in local.glob(pattern)]
    if pickles:
        raise UserError(f"{path} holds only pickled weights ({pickles[0]}), which can run code: convert to safetensors")
    raise UserError(f"{path} has no *.safetensors weights")


def _check_complete(path: str | Path, info: dict[str, Any]) -> None:
    """`transformers` fills weights it does not find with random numbers and only warns."""
    missing = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))
    if missing:
        raise UserError(f"{path}: {len(missing)} weights are missing or of the wrong shape, e.g. {missing[0]}")


def _guarded(loader: Any, named: str | Path, *args: Any, **kwargs: Any) -> Any:
    """Run a loader of `transformers`; its page-long errors become one line with the original chained."""
    try:
        return loader(*args, **kwargs)
    except LOAD_ERRORS as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if not Path(named).exists() and (fault := hub_fault()):
            reason = f"no such folder, not in the hub's cache, and {fault}"
        raise UserError(f"cannot load {named}: {reason}") from error
