"""A user's own modules, imported so that a recipe can name what they register: ``plugins: [my_rewards, shapes.py]``.

The current folder is not on ``sys.path``: a file in it could stand in for a module of the standard library or for a
package that is not installed. A finder behind all others finds there the modules that were named, and no others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from luffy.errors import ConfigError, UserError


class NamedModules(MetaPathFinder):
    """Finds a top-level module or package in the folder where it was named; ``folders`` has the folder by name."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [self.folders[name]]) if name in self.folders else None

    def add(self, folders: dict[str, str]) -> None:
        """Keep the folder of a module that is imported already: its name is taken."""
        self.folders.update({name: folder for name, folder in folders.items() if name not in sys.modules})
        if self not in sys.meta_path:
            sys.meta_path.append(self)


NAMED = NamedModules()


def load_plugins(plugins: Sequence[str], where: str = "plugins") -> list[ModuleType]:
    """Import each module (by name) or file (``*.py``, relative to the working folder); once, however often called. They
    may import each other. ``where``: the setting that names them."""
    for plugin in plugins:
        if plugin.endswith(".py"):
            path = Path(plugin).resolve()
            if not path.is_file():
                raise UserError(
                    f"'{where}': no file {plugin!r} in {os.getcwd()}; run luffy in its folder, or name its whole path"
                )
            NAMED.add({path.stem: str(path.parent)})
        else:
            find_in_current_folder(plugin)
    return [_load(plugin, where) for plugin in plugins]


def in_file(file: str, name: str, where: str, kind: str) -> Callable[..., Any]:
    """The function or class (``kind``, in words) of a user's file that the setting ``where`` names."""
    (module,) = load_plugins([file], where)
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"'{where}': {file} has no {kind} {name!r}")
    return found  # type: ignore[no-any-return]


def import_named(module: str) -> ModuleType:
    """Import a module that the user named, from the current folder if nothing else has that name."""
    find_in_current_folder(module)
    return import_module(module)


def find_in_current_folder(module: str) -> None:
    try:
        here = os.getcwd()
    except FileNotFoundError:  # a folder that was deleted holds no module
        return
    name = module.partition(".")[0]
    if NAMED.find_spec(name) is None:  # it may have been named elsewhere, as a file or before a change of folder
        NAMED.add({name: here})


def missing_neighbour(error: BaseException) -> str:
    """The remedy where a named module imports one that lies beside it and was not named; else nothing."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    files = [Path(folder, f"{error.name}.py") for folder in NAMED.folders.values()]
    found = next((file for file in files if file.is_file()), None)
    return "" if found is None else f"; add {_shown(found)} to 'plugins'"


def python_flags() -> list[str]:
    """Flags for a Python process that luffy starts: ``-P`` keeps the current folder off its path, where ``-m`` would
    put it first. No flags if luffy itself comes from that folder."""
    return [] if _home() == Path.cwd() else ["-P"]


def leave_current_folder() -> None:
    """Take the current folder off ``sys.path``, unless luffy itself comes from it or PYTHONPATH names it."""
    here, set_by_user = Path.cwd(), os.environ.get("PYTHONPATH")
    wanted = [Path(entry).resolve() for entry in set_by_user.split(os.pathsep)] if set_by_user else []
    if here not in (_home(), *wanted):
        sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]


def _home() -> Path:
    return Path(__file__).resolve().parent.parent


def _shown(file: Path) -> str:
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _load(plugin: str, where: str) -> ModuleType:
    path = Path(plugin).resolve() if plugin.endswith(".py") else None
    try:
        module = import_module(plugin if path is None else path.stem)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a script may end itself
        cause = f"{type(error).__name__}: {error}{missing_neighbour(error)}"
        raise UserError(f"'{where}': cannot import {plugin!r}: {cause}") from error
    if path is not None and Path(module.__file__ or "").resolve() != path:
        raise UserError(f"'{where}': {plugin!r} has the name of another module ({module.__file__}); rename the file")
    return module
