"""A user's own modules, imported so that a recipe can name what they register: ``plugins: [my_rewards, shapes.py]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from luffy.errors import UserError


def load_plugins(plugins: Sequence[str]) -> list[ModuleType]:
    """Import each module (by name) or file (``*.py``, relative to the working folder); once, however often called."""
    return [_load(plugin) for plugin in plugins]


def _load(plugin: str) -> ModuleType:
    path = Path(plugin).resolve() if plugin.endswith(".py") else None
    if path is not None:
        if not path.is_file():
            raise UserError(f"'plugins': no file {plugin!r}")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # for verifier processes too, which get this sys.path
    try:
        module = import_module(plugin if path is None else path.stem)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"'plugins': cannot import {plugin!r}: {type(error).__name__}: {error}") from error
    if path is not None and Path(module.__file__ or "").resolve() != path:
        raise UserError(f"'plugins': {plugin!r} has the name of another module ({module.__file__}); rename the file")
    return module
