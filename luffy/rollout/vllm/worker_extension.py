"""Code inside vLLM's workers: load a complete set of weights in place, and report the version and model.

vLLM mixes this class into its worker (``worker_extension_cls``), in our process or in a server's. It imports nothing
of vLLM, and over HTTP only strings and numbers reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What must agree between the policy and a server's model: for a push to fit, and for the same weights to compute the
# same. What the configs say of rope comes on top.
MODEL_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
)


def model_fields(config: Any) -> dict[str, Any]:
    """Fields that two configs of the same model agree on. A field that is None is left out, because another config may
    write the default; only a missing window stays None."""
    rope = {"rope_theta": getattr(config, "rope_theta", None), **(getattr(config, "rope_parameters", None) or {})}
    found = {**{name: getattr(config, name, None) for name in MODEL_FIELDS}, **rope}
    fields = {name: _rounded(value) for name, value in found.items() if value is not None}
    if hasattr(config, "sliding_window"):
        used = getattr(config, "use_sliding_window", True)
        fields["sliding_window"] = (used and config.sliding_window) or None
    return fields


def _rounded(value: Any) -> Any:
    """The config of a GGUF file has 1e-6 as 9.99999997e-7, for the file has float32."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


class LuffyWorker:
    """Methods for ``collective_rpc``. Answers are dictionaries: vLLM's HTTP route turns anything else into text."""

    model_runner: Any
    model_config: Any
    lora_config: Any = None
    device: Any
    luffy_loaded_version = -1  # the version of the weights here; -1: none of the run's
    luffy_base: str | None = None  # names the weights below adapters that are loaded apart from them

    def luffy_state(self) -> dict[str, Any]:
        config = self.model_config
        fields = model_fields(config.hf_config)
        if config.disable_sliding_window:  # vLLM takes no more tokens than the window then
            fields.pop("sliding_window", None)
        return {
            "version": self.luffy_loaded_version,
            "base": self.luffy_base,
            "takes_adapters": self.lora_config is not None,
            "max_context": config.max_model_len,
            "config": fields,
        }

    def luffy_load(
        self,
        version: int,
        weights: Iterable[tuple[str, Tensor]] | None = None,
        folder: str | None = None,
        base: str | None = None,
    ) -> dict[str, Any]:
        """Load all weights, from memory or from the safetensors files of a folder, into the tensors that are there.
        ``base`` names weights that adapters are computed beside."""
        if self.lora_config is not None and not hasattr(self.model_runner, "reset_lora_state"):
            return {"error": "this vLLM is too old (0.32 is not): set rollout.vllm.adapters=merged"}
        if weights is None:
            assert folder is not None
            files = sorted(Path(folder).glob("*.safetensors"))
            if not files:
                return {"error": f"{folder} holds no weights here: is it on a disk that this server shares?"}
            weights = tensors_in(files)
        model = self.model_runner.get_model()
        with torch.device(self.device), noting_loaded(model) as loaded:
            self.model_runner.reload_weights(weights_iterator=iter(weights))
        repack_tied_heads(model)
        missing = not_filled(model, loaded)
        if missing:
            return {"error": f"{len(missing)} parameters got no weights, e.g. {missing[0]}"}
        self.luffy_loaded_version, self.luffy_base = version, base
        return {"version": version}

    def luffy_note_version(self, version: int) -> dict[str, Any]:
        """The weights or adapters came by vLLM's own way."""
        self.luffy_loaded_version = version
        return {"version": version}


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                yield name, opened.get_tensor(name)


@contextmanager
def noting_loaded(model: Any) -> Iterator[set[str]]:
    """The parameters that the model's ``load_weights`` fills meanwhile: vLLM only logs those it did not. Models of
    vLLM that do not tell leave every name in."""
    load: Callable[..., Any] = model.load_weights
    loaded: set[str] = set()

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        loaded.update(result if result is not None else (name for name, _ in model.named_parameters()))
        return result

    model.load_weights = noting
    try:
        yield loaded
    finally:
        del model.load_weights


def not_filled(model: Any, loaded: set[str]) -> list[str]:
    """Parameters that got nothing, neither themselves nor as another name of the same memory (a tied head). Those below
    adapters are known by their checkpoint's names."""
    named = {_checkpoint_name(name): parameter for name, parameter in model.named_parameters()}
    loaded = {_checkpoint_name(name) for name in loaded}
    filled = {named[name].data_ptr() for name in loaded & named.keys() if named[name].numel()}
    return sorted(name for name in named.keys() - loaded if named[name].data_ptr() not in filled)


def _checkpoint_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


def repack_tied_heads(model: Any) -> None:
    """Pack tied heads again. On a CPU vLLM multiplies with a packed copy of a matrix; reloading packs layers whose
    weights come, but a head tied to the embedding gets none and would keep its first copy."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and getattr(module, "weight", torch.empty(0)).numel():
            module.quant_method.process_weights_after_loading(module)
