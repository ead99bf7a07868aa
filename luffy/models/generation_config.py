"""Generation configs that `transformers` reads with a warning, and then refuses to save."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from luffy.models.forward import causal_lm

logger = logging.getLogger(__name__)

SWITCHES = ("do_sample", "num_beams", "return_dict_in_generate")  # other settings are valid only with these
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}


def make_savable(model: nn.Module, named: str) -> None:
    """Put the model's generation config right, or no checkpoint of it could be written. Settings of sampling turn it on
    where the file does not say; others that contradict are left out. A warning says which."""
    owner: Any = causal_lm(model)
    config = owner.generation_config
    if config is None or _is_valid(config):
        return
    settings = {name: value for name, value in vars(config).items() if value is not None}
    mended, left_out = _valid_part(type(config), settings)
    changes = []
    if "do_sample" not in settings and SAMPLING & set(left_out):
        mended, left_out = _valid_part(type(config), settings | {"do_sample": True})
        changes = ["do_sample is true"]
    owner.generation_config = mended
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
