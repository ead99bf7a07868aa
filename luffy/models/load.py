"""Models and tokenizers from a folder, a hub id or a GGUF file; whatever is wrong is one clear line."""

from __future__ import annotations

import functools
import hashlib
import logging
import struct
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from luffy.errors import UserError
from luffy.files import alone, cache_folder, json_object
from luffy.hub import hub_fault
from luffy.models.forward import causal_lm, max_positions, text_config
from luffy.models.four_bit import KIND, keep_four_bits, loading_settings
from luffy.models.plain import choose_path
from luffy.models.shared import Base, taken

logger = logging.getLogger(__name__)

disable_progress_bar()  # its bars for loading and saving would tear a run's own view apart

# What `transformers` and the readers below it raise for absent, damaged or foreign files.
LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
    struct.error,
)
SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DtypeName = Literal["float32", "bfloat16"]
# Of a generation config: settings that make others valid, and settings of sampling.
SWITCHES = ("do_sample", "num_beams", "return_dict_in_generate")  # other settings are valid only with these
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}


def load_model(
    path: str | Path,
    dtype: DtypeName = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    four_bits: bool = False,
    frozen: bool = False,
) -> PreTrainedModel:
    """A causal LM, ready to train and to generate: safetensors or GGUF weights, never pickles. ``four_bits``: its
    decoder's linear layers are frozen and quantized (`luffy.models.four_bit`). ``frozen``: nobody will write to its
    parameters, so they may be those of several processes (`luffy.models.shared`)."""
    if dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is unknown: use {' or '.join(DTYPES)}")
    say_slow_dtype(dtype, device)
    base = Base(str(path), dtype, device, trust_remote_code, four_bits)
    model = (taken(base) if frozen else None) or read_model(base)
    choose_path(model)
    return model


def read_model(base: Base) -> PreTrainedModel:
    """The same, before it is known whether luffy's own attention serves it."""
    path, device, trust_remote_code, four_bits = base.path, base.device, base.trust_remote_code, base.four_bits
    folder = model_folder(path)
    check_local(folder, "config.json")
    check_quantization(load_model_config(folder, trust_remote_code), folder, four_bits)
    read = functools.partial(_load_four_bits, device=device) if four_bits else _load_safetensors
    model: PreTrainedModel = read(folder, DTYPES[base.dtype], trust_remote_code)
    for parameter in filter(torch.is_floating_point, model.parameters()):
        # Parameters only: rotary frequencies are buffers, and rounding them turns far positions by whole radians.
        parameter.data = parameter.data.to(DTYPES[base.dtype])
    nn.Module.to(model, device=torch.device(device))
    return model


def slow_dtype(dtype: str, device: str) -> str:
    """A remark on a dtype for which the device has no fast instructions, else ''."""
    if dtype != "bfloat16" or torch.device(device).type != "cpu":
        return ""
    try:
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):  # a torch without oneDNN, on a Mac for one, has another way
        return ""
    return "" if fast else "this CPU has no bfloat16 instructions and takes many times longer with it: use float32"


def say_slow_dtype(dtype: str, device: str) -> None:
    """Log that remark, once; torch's own, which comes with a C++ stack, is kept back."""
    if remark := slow_dtype(dtype, device):
        _say_once(remark)


@functools.cache
def _say_once(remark: str) -> None:
    logger.warning(remark)
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Tokenizer in the folder of the weights."""
    path = model_folder(path)
    check_local(path, "tokenizer_config.json")
    return _guarded(AutoTokenizer.from_pretrained, path, str(path), trust_remote_code=trust_remote_code)


def load_model_config(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Config in the folder of the weights."""
    return _guarded(AutoConfig.from_pretrained, path, str(path), trust_remote_code=trust_remote_code)


def check_quantization(config: Any, path: str | Path, four_bits: bool) -> None:
    """Raise a UserError for a folder whose weights are quantized, unless they are read as they are (``four_bits``)."""
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return
    if not four_bits:
        raise UserError(
            f"{path}: quantized weights cannot be trained; load the unquantized model, or train adapters beside "
            f"{' '.join(KIND)} weights with model.lora.quantize=nf4"
        )
    if (saved.get("quant_method"), saved.get("bnb_4bit_quant_type")) != KIND:
        raise UserError(f"{path}: its weights are quantized in another way than {' '.join(KIND)}; load the original")


def decode(tokenizer: Any, responses: Sequence[Any]) -> list[str]:
    """The text of each response's token ids, without special tokens."""
    lists = [
        ids if isinstance(ids, list) else ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        for ids in responses
    ]
    if not lists:  # for which some versions of `transformers` give one empty text
        return []
    if _is_plain(tokenizer):
        texts: list[str] = tokenizer.backend_tokenizer.decode_batch(lists, skip_special_tokens=True)  # on all cores
        return texts
    return tokenizer.batch_decode(lists, skip_special_tokens=True)  # type: ignore[no-any-return]


def _is_plain(tokenizer: Any) -> bool:
    """Whether its texts are those of the library behind it, unchanged by `transformers` or by a class of its own."""
    plain = all(getattr(type(tokenizer), n, None) is getattr(PreTrainedTokenizerFast, n) for n in ("decode", "_decode"))
    return plain and not tokenizer.clean_up_tokenization_spaces


def token_count(tokenizer: Any) -> int:
    """Ids a tokenizer can give, from 0 on; a model often has more rows, of padding."""
    return 1 + max(tokenizer.get_vocab().values())


def vocabulary_in(path: str | Path, trust_remote_code: bool = False) -> int | None:
    """Tokens that the model of a folder knows, before its weights are read; None where its config does not say."""
    try:
        config = AutoConfig.from_pretrained(str(model_folder(path)), trust_remote_code=trust_remote_code)
    except LOAD_ERRORS:  # what is wrong with the folder is said when the model is loaded
        return None
    size: int | None = getattr(text_config(config), "vocab_size", None)
    return size


def read_model_config(path: str, knob: str, trust_remote_code: bool) -> Any:
    """The config of a model's folder; an error names the ``knob``."""
    try:
        check_local(path, "config.json")
    except UserError as error:
        raise UserError(f"'{knob}' {error}") from None
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise UserError(f"'{knob}' {path}: {_asks_for_trust(error) or ' '.join(str(error).split())[:300]}") from None


def drop_padding_tokens(model: PreTrainedModel, tokens: int) -> None:
    """Cut embeddings and head to the first ``tokens`` rows: a distribution over them alone, renormalised."""
    if text_config(model.config).vocab_size > tokens:
        model.resize_token_embeddings(tokens)


def eos_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every token id that ends a response: those of the generation config, then the tokenizer's own."""
    return eos_ids_of(causal_lm(model).generation_config, tokenizer)


def eos_ids_in(path: str | Path, tokenizer: Any, trust_remote_code: bool = False) -> tuple[int, ...]:
    """The same as ``eos_ids`` before the weights are read: the tokenizer's own first, then those in the folder."""
    folder, generation = str(model_folder(path)), None
    with suppress(*LOAD_ERRORS):  # what is wrong with the folder is said when the model is loaded
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        generation = GenerationConfig.from_model_config(config)
    with suppress(*LOAD_ERRORS):
        generation = GenerationConfig.from_pretrained(folder)
    own = tokenizer.eos_token_id
    found = eos_ids_of(generation, tokenizer)
    return found if own is None else (own, *(token for token in found if token != own))


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


def _load_four_bits(path: str | Path, dtype: torch.dtype, trust_remote_code: bool, device: str) -> PreTrainedModel:
    settings = loading_settings(dtype)
    saved = getattr(load_model_config(path, trust_remote_code), "quantization_config", None)
    more = {} if saved else {"quantization_config": settings}
    model = _load_safetensors(path, dtype, trust_remote_code, device_map={"": device}, **more)
    keep_four_bits(model, dtype)
    _forget_quantization(model)
    return model


def _load_safetensors(path: str | Path, dtype: torch.dtype, trust_remote_code: bool, **more: Any) -> PreTrainedModel:
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
        **more,
    )
    _check_complete(path, info)
    return model


def model_folder(path: str | Path) -> str | Path:
    """Folder to read a model from: ``path``, or the folder that a GGUF file was converted to."""
    gguf = gguf_file(path)
    return path if gguf is None else _converted(gguf)


def _converted(file: Path) -> Path:
    """De-quantized weights, float32, and tokenizer of a GGUF file as a Hugging Face folder in the cache, made when it
    is not there: `transformers` takes half a minute for 135 million weights, at every start and for each part."""
    now = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {now.st_size} {now.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_folder() / "gguf" / f"{file.stem}-{key}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target.parent / ".lock"):
            if not target.is_dir():
                _convert(file, target)
    except OSError as error:
        raise UserError(
            f"{file}: cannot write its converted copy {target} ({error.strerror or error}); set LUFFY_CACHE to a "
            "writable folder with room"
        ) from error
    return target


def _convert(file: Path, target: Path) -> None:
    logger.warning("%s is converted once; later starts read %s", file, target)
    with _quiet_bars():
        tokenizer = _guarded(AutoTokenizer.from_pretrained, file, str(file.parent), gguf_file=file.name)
        model = _load_gguf(file)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as unfinished:
        folder = Path(unfinished) / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folder.rename(target)


@contextmanager
def _quiet_bars() -> Iterator[None]:
    """The reader of GGUF files draws a bar of its own, which `disable_progress_bar` does not reach."""
    from transformers import modeling_gguf_pytorch_utils as reader

    with patch.object(reader, "tqdm", lambda items, **_: items):
        yield


def _load_gguf(file: Path) -> PreTrainedModel:
    """De-quantized weights. `transformers` marks the model it reads as quantized, and such a model refuses to be
    saved; its weights are plain."""
    loaded: Any
    loaded, info = _guarded(
        AutoModelForCausalLM.from_pretrained,
        file,
        str(file.parent),
        gguf_file=file.name,
        dtype=torch.float32,
        output_loading_info=True,
    )
    _check_complete(file, info)
    _forget_quantization(loaded)
    model: PreTrainedModel = loaded
    return model


def _forget_quantization(model: Any) -> None:
    """Remove what `transformers` notes at a model whose file was quantized."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for mark in ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit"):
        if mark in vars(model):
            delattr(model, mark)


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
    for file in (local / name for name in SETTINGS if (local / name).is_file()):
        json_object(file.read_bytes(), file, "get the model again")
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
        reason = _asks_for_trust(error) or (lines[0] if lines else type(error).__name__)
        if not Path(named).exists() and (fault := hub_fault()):
            reason = f"no such folder, not in the hub's cache, and {fault}"
        raise UserError(f"cannot load {named}: {reason}") from error


def _asks_for_trust(error: Exception) -> str:
    """The setting to name if a model was refused because it contains code, else ''."""
    if "`trust_remote_code=True`" not in str(error):
        return ""
    return (
        "it comes with Python code, which is not run by default: read it, then set model.trust_remote_code=true, or "
        "give --trust-remote-code (eval, generate, prepare)"
    )


def make_savable(model: nn.Module, named: str) -> None:
    """Make the model's generation config valid: `transformers` reads an invalid one with a warning and then refuses to
    save it. Sampling settings turn sampling on if the file does not; others that contradict are left out, with a
    warning."""
    owner: Any = causal_lm(model)
    config = owner.generation_config
    if config is None or _is_valid(config):
        return
    settings = {name: value for name, value in vars(config).items() if value is not None}
    valid, left_out = _valid_part(type(config), settings)
    changes = []
    if "do_sample" not in settings and SAMPLING & set(left_out):
        valid, left_out = _valid_part(type(config), settings | {"do_sample": True})
        changes = ["do_sample is true"]
    owner.generation_config = valid
    changes += [f"{name} {settings[name]!r} is left out" for name in left_out]
    logger.warning("%s: its generation config is not valid; in saved models %s", named, ", ".join(changes))


def _valid_part(kind: Any, settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """A config with the settings that go together, and the names of the others."""
    config, left_out = kind(), []
    for name in sorted(settings, key=lambda name: name not in SWITCHES):
        before = getattr(config, name, None)
        setattr(config, name, settings[name])
        if not _is_valid(config):
            setattr(config, name, before)
            left_out.append(name)
    return config, left_out


def _is_valid(config: Any) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def check_fits(named: str, model_config: Any, tokenizer: Any, longest: int, known: int | None = None) -> None:
    """Another model than the policy must know every token (``known``: the first ones that the policy knows) and take
    ``longest`` of them; ``named`` is its knob and path."""
    tokens = min(token_count(tokenizer), known or token_count(tokenizer))
    vocabulary = text_config(model_config).vocab_size
    if vocabulary < tokens:
        raise UserError(
            f"{named} has {vocabulary} tokens, fewer than the tokenizer's {tokens}; it "
            "must be a model of the policy's own tokenizer"
        )
    context = max_positions(model_config)
    if context < longest:
        raise UserError(
            f"{named} takes {context} tokens, but data.max_prompt_tokens + rollout.max_tokens = {longest}; lower one "
            "of them or take another model"
        )


def check_same_tokenizer(draft_tokenizer: Any, second_tokenizer: Any, called: str = "second model") -> None:
    """Both models must mean the same by every token id; the error names the first difference, and the second model as
    it is ``called``."""
    draft, second = draft_tokenizer.get_vocab(), second_tokenizer.get_vocab()
    names = [{token_id: token for token, token_id in vocab.items()} for vocab in (draft, second)]
    for token_id in sorted(names[0].keys() | names[1].keys()):
        _check_same(f"token id {token_id}", names[0].get(token_id), names[1].get(token_id), called)
    # Padding is left out: no model ever reads or writes it here.
    for kind in ("eos_token", "bos_token", "unk_token"):
        _check_same(kind, getattr(draft_tokenizer, kind, None), getattr(second_tokenizer, kind, None), called)
    special = [set(t.all_special_tokens) - {t.pad_token} for t in (draft_tokenizer, second_tokenizer)]
    for token in sorted(special[0] ^ special[1]):
        ours, theirs = ("there" if token in kept else None for kept in special)
        _check_same(f"{token!r} as a special token", ours, theirs, called)


def check_same_ids(draft_tokenizer: Any, second_tokenizer: Any, called: str) -> None:
    """Every token id that both have means the same. Less than `check_same_tokenizer` asks: for a model that only scores
    what the policy wrote, the end of a response may have another token, as in a base and its instruct model."""
    names = [{i: token for token, i in t.get_vocab().items()} for t in (draft_tokenizer, second_tokenizer)]
    for token_id in sorted(names[0].keys() & names[1].keys()):
        _check_same(f"token id {token_id}", names[0][token_id], names[1][token_id], called)


def _check_same(what: str, draft: object, second: object, called: str) -> None:
    if draft != second:
        raise UserError(
            f"the tokenizers differ: {what} is {_named(draft)} for the policy and {_named(second)} for the {called};"
            " both must have the same tokenizer"
        )


def _named(value: object) -> str:
    return "missing" if value is None else repr(value)
