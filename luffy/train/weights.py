"""The policy's weights: loaded from the config's model or from a checkpoint, and written as a Hugging Face folder."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from luffy.config import Config, ModelConfig
from luffy.distributed.replica import on_host
from luffy.errors import ConfigError, UserError, needing
from luffy.models.forward import causal_lm
from luffy.models.load import load_model, make_savable
from luffy.rollout.policy_weights import tensors_of
from luffy.run_folder.checkpoint import Checkpoint
from luffy.run_folder.layout import CARD
from luffy.run_folder.saved_state import read_safetensors
from luffy.step.snapshot import model_kind

FINGERPRINT_VALUES = 64  # of each tensor


def load_policy(cfg: ModelConfig, device: str) -> nn.Module:
    """The model to train, with fresh adapters when LoRA is on."""
    if not cfg.path:
        raise ConfigError("'model.path' is empty; give a Hugging Face folder or hub id")
    frozen = cfg.lora is not None
    model: nn.Module = load_model(cfg.path, cfg.dtype, device, cfg.trust_remote_code, cfg.four_bits, frozen)
    make_savable(model, cfg.path)
    return model if cfg.lora is None else add_adapters(model, cfg)


def add_adapters(model: nn.Module, cfg: ModelConfig) -> nn.Module:
    with needing("'model.lora' needs peft", "peft", ConfigError):
        import peft
    assert cfg.lora is not None
    lora = cfg.lora
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"'model.lora': {error}") from None
    _check_tied(adapted)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # adapters learn in float32 whatever the base's dtype
            parameter.data = parameter.data.float()
    return adapted


def _check_tied(adapted: nn.Module) -> None:
    """Refuse adapters of tied weights: merging one would change the other module too."""
    weights: dict[int, list[str]] = {}
    for name, module in adapted.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and not list(module.children()):
            weights.setdefault(id(weight), []).append(name)
    for names in weights.values():
        adapter = next((name for name in names if name.endswith(".base_layer")), None)
        if adapter is not None and len(names) > 1:
            other = next(name for name in names if name != adapter)
            raise ConfigError(
                f"'model.lora.target_modules' adapts {adapter.removesuffix('.base_layer')}, whose weight is tied to "
                f"{other}: leave it out"
            )


def load_weights(cfg: Config, method: str, place: str, checkpoint: Checkpoint | None) -> nn.Module:
    """The model to train: the config's, or a checkpoint's if that is of the same method and kind of model."""
    if checkpoint is None:
        return load_policy(cfg.model, place)
    check_same_kind(cfg, method, checkpoint)
    if cfg.model.lora is None:
        return load_policy(replace(cfg.model, path=str(checkpoint.model)), place)
    model = load_policy(cfg.model, place)
    load_adapter(model, checkpoint.adapter)
    return model


def check_same_kind(cfg: Config, method: str, checkpoint: Checkpoint) -> None:
    state = checkpoint.state()
    if state["method"] != method:
        commands = {"rl": "luffy train", "sft": "luffy sft"}
        raise UserError(
            f"checkpoint {checkpoint.path} was made by `{commands[state['method']]}`, this is "
            f"`{commands[method]}`; start a new run with model.path={checkpoint.model}"
        )
    saved, now = state["model"], model_kind(cfg)
    differ = [f"model.{key} {saved.get(key)} -> {now[key]}" for key in now if saved.get(key) != now[key]]
    if differ:
        raise UserError(
            f"checkpoint {checkpoint.path} is of another kind of model: {', '.join(differ)}; set that as it was, "
            f"or start a new run with model.path={checkpoint.model}"
        )


def base_of(cfg: Config, model: nn.Module, checkpoint: Checkpoint | None) -> str | None:
    """Fingerprint of the weights below the adapters, None without LoRA; a checkpoint's adapters must have the same one.
    ``model`` is unsharded, as loaded."""
    if cfg.model.lora is None:
        return None
    base = fingerprint(parameter for parameter in model.parameters() if not parameter.requires_grad)
    saved = None if checkpoint is None else checkpoint.state()["model"].get("base")  # older ones do not say
    if checkpoint is not None and saved not in (None, base):
        raise UserError(
            f"checkpoint {checkpoint.path} has LoRA adapters of another base model than model.path={cfg.model.path}; "
            f"set model.path as it was (the same weights in another folder will do), or start a new run with "
            f"model.path={checkpoint.model}"
        )
    return base


def fingerprint(weights: Iterable[torch.Tensor]) -> str:
    """Hash of the shapes and of some values of all tensors, in any order: tells models apart without reading every
    weight."""
    parts = []
    for weight in weights:
        values = weight.detach().reshape(-1)
        values = values[:: max(values.numel() // FINGERPRINT_VALUES, 1)][:FINGERPRINT_VALUES].float().cpu()
        parts.append(str(tuple(weight.shape)).encode() + values.numpy().tobytes())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in sorted(parts))).hexdigest()


def load_adapter(model: nn.Module, folder: Path) -> None:
    from peft import set_peft_model_state_dict

    result: Any = set_peft_model_state_dict(model, read_safetensors(folder / "adapter_model.safetensors"))
    if result.unexpected_keys:
        raise UserError(f"adapter {folder} does not fit model.lora: unexpected {result.unexpected_keys[:3]}")


@dataclass(frozen=True)
class Export:
    """The model as a checkpoint keeps it: a Hugging Face folder, adapters merged; with LoRA the adapters too.
    ``weights``: those to write, if they are not the model's current ones."""

    model: Any
    tokenizer: Any
    eos_ids: tuple[int, ...]
    lora: bool
    weights: dict[str, torch.Tensor] | None = None

    def copied(self) -> Export:
        """The same with a copy of the current weights, which the training does not change."""
        if self.lora:
            return replace(self, model=copy.deepcopy(self.model))
        return replace(self, weights=on_host(self.model))

    def write(self, folder: Path) -> None:
        model, weights = self.model, self.weights
        if self.lora:
            model.save_pretrained(folder / "adapter")
            (folder / "adapter" / CARD).unlink(missing_ok=True)  # peft's names the base by its path on this machine
            model = causal_lm(model)
            buffers = {name for name, _ in model.named_buffers()}
            kept = {name: value for name, value in model.state_dict().items() if name in buffers}
            weights = {name: value.cpu() for name, value in chain(kept.items(), tensors_of(self.model))}  # one by one
        # Parameters that are views of one memory would be copied on the GPU first, all at once.
        if weights is None and next(model.parameters()).is_cuda:
            weights = on_host(model)
        if model.generation_config is not None:  # a custom class may have none
            model.generation_config.eos_token_id = list(self.eos_ids)  # the end of a turn too: generation stops there
        model.save_pretrained(folder / "model", state_dict=weights)
        self.tokenizer.save_pretrained(folder / "model")


def with_template(tokenizer: Any, template: str | None) -> Any:
    """The tokenizer with the chat template of the run's prompts, so that the exported model is prompted as trained."""
    if template is None:
        return tokenizer
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer
