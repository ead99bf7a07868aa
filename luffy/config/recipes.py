"""Recipes: YAML files found, composed and read into a checked ``Config``."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from luffy.config.checks import Config, check_learns
from luffy.config.legacy import merge, set_at, with_current_keys
from luffy.config.stages import by_name, stages_of
from luffy.errors import ConfigError
from luffy.plugins import load_plugins
from luffy.schema import build, nearest, to_dict
from luffy.yaml_text import YAML_ERRORS, check_size, parse_yaml, read_yaml

PACKAGE = Path(__file__).parent.parent
BUILT_IN_RECIPES = PACKAGE / "recipes"
SHOWN = 60  # characters of a long override in an error


def load_config(
    recipe: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """A checked config from a recipe with overrides.

    ``recipe``: a file, a built-in name, or nested dictionaries; None: the defaults. ``overrides``:
    ``["optim.lr=1e-5"]`` or ``{"optim.lr": 1e-5}``.
    """
    values = read_mapping(recipe) if isinstance(recipe, Mapping) else {} if recipe is None else read_recipe(recipe)
    if isinstance(overrides, Mapping):
        pairs = [(key.split("."), value) for key, value in overrides.items()]
    else:
        pairs = [parse_override(override) for override in overrides]
    for keys, value in pairs:
        check_size(value, ".".join(keys))
        set_at(values, keys, value)
    return config_of(_Reader().with_bases_of_stages(values))


def read_mapping(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe that is given as nested dictionaries."""
    check_size(recipe, "the recipe")
    return _Reader().over_bases(copy.deepcopy(dict(recipe)), "the recipe")


def config_of(values: Mapping[str, Any]) -> Config:
    """A checked config from nested values; its plugins are imported first, because the checks know their names."""
    plugins = values.get("plugins", ())
    if isinstance(plugins, list | tuple) and all(isinstance(plugin, str) for plugin in plugins):
        load_plugins(plugins)
    config = build(Config, values)
    stages_of(config)
    return config


def check_prepared(config: Config) -> None:
    """Raise a ConfigError with the commands of ``prepare`` that make the files which the config names and which are not
    there."""
    values = to_dict(config)
    commands = values.pop("prepare")
    named = set(_texts(values))
    missing = {path: command for path, command in commands.items() if path in named and not Path(path).exists()}
    if missing:
        steps = "".join(f"\n  {command}" for command in dict.fromkeys(missing.values()))
        raise ConfigError(f"not there yet: {', '.join(missing)}; make them with:{steps}")


def check_made_for(config: Config, method: Literal["rl", "sft"]) -> None:
    """Raise a ConfigError where a recipe of SFT is to be trained by RL, or RL with it could never change a weight."""
    stages = stages_of(config)
    if stages and method == "sft":
        raise ConfigError(
            f"recipe '{config.name}' has stages ({', '.join(config.stages)}): luffy train makes them all; for SFT "
            "alone add 'stages={}'"
        )
    if method == "sft":
        return
    if config.made_for == "sft":
        raise ConfigError(
            f"recipe '{config.name}' is made for SFT: run it with luffy sft, or set made_for=rl for RL with it"
        )
    for trained in [stage.cfg for stage in stages if stage.method == "rl"] if stages else [config]:
        check_learns(trained)


def _texts(value: Any) -> Iterator[str]:
    """All strings in nested values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """The recipe's values over those of the recipes it names as ``base``; without a ``name`` the file's own."""
    return _Reader().recipe(recipe, ())


class _Reader:
    """Reads recipes with their bases, each file once, however many recipes name it. ``seen``: the files that lead to a
    recipe by naming one another."""

    def __init__(self) -> None:
        self.known: dict[Path, dict[str, Any]] = {}

    def recipe(self, recipe: str | Path, seen: tuple[Path, ...]) -> dict[str, Any]:
        paths = _find(recipe, seen[-1].parent if seen else None)
        if len(paths) > 1:
            return {**self.merged(paths, seen), "name": f"{paths[0].stem}-{paths[-1].stem}".replace("_", "-")}
        (path,) = paths
        if path in seen:
            raise ConfigError(f"recipe {path} inherits itself through {' -> '.join(p.name for p in seen)}")
        if path not in self.known:
            self.known[path] = self.over_bases({"name": path.stem, **_parse_recipe(path)}, path, (*seen, path))
        return copy.deepcopy(self.known[path])

    def over_bases(self, recipe: dict[str, Any], where: Path | str, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
        """The values of a recipe and its stages, over those of the recipes that they name as their bases."""
        values = self.with_bases_of_stages(with_current_keys(_with_package_paths(recipe)), seen)
        return merge(self.merged(_bases(values.pop("base", []), where), seen), values)

    def merged(self, recipes: Sequence[str | Path], seen: tuple[Path, ...] = ()) -> dict[str, Any]:
        """The values of all of them; a later recipe wins."""
        values: dict[str, Any] = {}
        for recipe in recipes:
            merge(values, self.recipe(recipe, seen))
        return values

    def with_bases_of_stages(self, values: dict[str, Any], seen: tuple[Path, ...] = ()) -> dict[str, Any]:
        """The values with each stage laid over the recipes that it names as its base."""
        if "stages" not in values:
            return values
        stages = by_name(values["stages"])
        for name, stage in stages.items():
            if isinstance(stage, Mapping) and "base" in stage:
                own = {key: value for key, value in stage.items() if key != "base"}
                below = self.merged(_bases(stage["base"], f"stage {name!r}"), seen)
                settings = {key: value for key, value in below.items() if key not in ("name", "stages", "prepare")}
                stages[name] = merge(settings, with_current_keys(own))
        return {**values, "stages": stages}


def inherited_for_rl(recipe: str | Path, overrides: Sequence[str], key: str) -> str | None:
    """Where the value of ``key`` comes from, in words, when neither an override nor the user's own recipe file says it,
    nor a base that is made for SFT; else None. Built-in recipes say what they mean."""
    paths = _find(recipe, None)
    section, _, name = key.partition(".")
    if paths[0].is_relative_to(BUILT_IN_RECIPES) or any(text.partition("=")[0].strip() == key for text in overrides):
        return None
    own = _parse_recipe(paths[0])
    given = own.get(section)
    bases = _bases(own.get("base", []), paths[0])
    made_for = _Reader().merged(bases, (paths[0],)).get("made_for")
    if (isinstance(given, Mapping) and name in given) or made_for == "sft":
        return None
    return f"base {', '.join(bases)}" if bases else "the default"


def _bases(value: Any, path: Path | str) -> list[str]:
    bases = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: 'base' must be a recipe or a list of recipes, got {value!r}")
    return bases


def _find(recipe: str | Path, beside: Path | None) -> tuple[Path, ...]:
    """The file of a recipe, or the files of ``size/method``."""
    name = str(recipe)
    places = [Path(name)] if beside is None else [beside / name, Path(name)]
    built_in = BUILT_IN_RECIPES / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    for path in (*places, built_in):
        if os.path.isfile(path):  # unlike Path.is_file, no error where a name is too long to be one
            return (path.resolve(),)
        if parts := _composed(path):
            return parts
    files = [path.name for path in (beside or Path()).glob("*.y*ml")]
    hint = nearest(name, files) if name.endswith((".yaml", ".yml")) else ""
    hint = hint or nearest(name, list(built_in_recipes())) or "; `luffy recipes` lists the built-in ones"
    named = "" if beside is None else f", which a recipe in {beside} names as its base"
    raise ConfigError(f"no recipe {name!r}{named}: neither a file nor a built-in one{hint}")


def _composed(path: Path) -> tuple[Path, ...]:
    """``tiny/luffy`` is ``sizes/tiny`` and ``methods/luffy``; ``tiny/base`` is ``sizes/tiny``; else nothing. Between
    them a kind of SFT has ``SIZE/sft``, if there is one, with its steps and learning rate."""
    if not path.absolute().is_relative_to(BUILT_IN_RECIPES):
        return ()
    size, _, method = str(path.absolute().relative_to(BUILT_IN_RECIPES).with_suffix("")).partition("/")
    names = [f"sizes/{size}.yaml"] if method == "base" else [f"sizes/{size}.yaml", f"methods/{method}.yaml"]
    parts = tuple(BUILT_IN_RECIPES / name for name in names)
    if not all(map(os.path.isfile, parts)):
        return ()
    of_sft = BUILT_IN_RECIPES / f"{size}/sft.yaml"
    if method != "base" and _parse_recipe(parts[1]).get("base") == "methods/sft" and os.path.isfile(of_sft):
        return (parts[0], of_sft, parts[1])
    return parts


def built_in_recipes() -> dict[str, str]:
    """Purpose of each built-in recipe by name; ``size/method`` has the method's."""
    files = {
        path.relative_to(BUILT_IN_RECIPES).with_suffix("").as_posix(): path for path in BUILT_IN_RECIPES.rglob("*.yaml")
    }
    lines = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in sorted(files.items())}
    about = {name: line.removeprefix("#").strip() for name, line in lines.items()}
    sizes, methods = (
        [name.partition("/")[2] for name in about if name.startswith(f"{kind}/")] for kind in ("sizes", "methods")
    )
    bases = {f"{size}/base": about[f"sizes/{size}"] for size in sizes}
    composed = {f"{size}/{method}": about[f"methods/{method}"] for size in sizes for method in methods}
    return bases | composed | about


def _with_package_paths(value: Any) -> Any:
    """``package:quickstart/assets/base`` in a recipe names a file that is installed with luffy."""
    if isinstance(value, dict):
        return {k: _with_package_paths(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_with_package_paths(inner) for inner in value]
    if isinstance(value, str) and value.startswith("package:"):
        return str(PACKAGE / value.removeprefix("package:"))
    return value


def _parse_recipe(path: Path) -> dict[str, Any]:
    values = parse_yaml(path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, got {type(values).__name__}")
    return values


def parse_override(text: str) -> tuple[list[str], Any]:
    """``"optim.lr=1e-5"`` -> ``(["optim", "lr"], "1e-5")``, the value read as YAML."""
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"override {text!r} must look like section.key=value")
    try:
        value = read_yaml(raw, f"override {key.strip()}") if raw.strip() else None
    except ConfigError:
        raise
    except YAML_ERRORS as error:
        shown = text if len(text) <= SHOWN else text[:SHOWN] + "..."
        raise ConfigError(f"override {shown!r}: not a YAML value: {' '.join(str(error).split())}") from None
    return key.strip().split("."), value


def to_yaml(config: Config) -> str:
    """The resolved config as YAML; reading it returns an equal config."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
