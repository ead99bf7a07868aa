"""Typed configuration objects from plain dictionaries, on standard dataclasses.

A setting is a dataclass field with its meaning and its bounds beside its default. Reading checks names (an unknown key
is an error that names the nearest known one), types and bounds, with the dotted path of the key in every message. A
field that chooses a part by name (``knob(..., parts=REGISTRY)``) holds a ``Chosen``: the name and the part's settings.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import json
import math
import operator
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin

from luffy.errors import ConfigError

T = TypeVar("T")
MOST = 2**63 - 1  # of whole numbers: what 64 bits hold
LARGEST = 10**308  # of whole numbers that are read as floats
SPOKEN = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
SWITCH = {False: "off", True: "on"}  # YAML reads these words as truth values


class Parts(Protocol):
    """What a field with ``parts`` asks of a registry."""

    def read(self, value: Any, where: str, default: str = "") -> Chosen:
        """A part by its name, or by a mapping of ``name`` (else ``default``) and its settings."""

    def known(self, name: str) -> Any:
        """The registered part of that name with its facts."""

    def settings(self) -> Iterator[tuple[str, type]]:
        """The built-in parts that have settings: name and dataclass of each."""


class Chosen(str):
    """The name of a part that a config chooses, with the part's ``settings`` (a dataclass). Compares with a plain name
    like a string, and with another choice by its settings too."""

    settings: Any
    parts: Any

    def __new__(cls, name: str, settings: Any = None, parts: Parts | None = None) -> Chosen:
        chosen = super().__new__(cls, name)
        chosen.settings, chosen.parts = settings, parts
        return chosen

    @property
    def part(self) -> Any:
        """The registered part with its facts; of a ``module:function`` the facts are those of any part."""
        return self.parts.known(self)

    def fact(self, name: str) -> Any:
        """A fact about the part as it is set: its settings may say otherwise than the part in general."""
        return getattr(self.settings, name, getattr(self.part, name))

    @property
    def shown(self) -> str:
        """The name with its settings, on one line: ``p_div_p (gamma 0.1)``."""
        given = ", ".join(f"{f.name} {getattr(self.settings, f.name)}" for f in dataclasses.fields(self.settings))
        return f"{self} ({given})" if given else str(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Chosen) and self.settings != other.settings:
            return False
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __deepcopy__(self, memo: Any) -> Chosen:
        return self

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.settings, self.parts)


def knob(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    factory: Any = dataclasses.MISSING,
    required: bool = False,
    parts: Parts | None = None,
) -> Any:
    """A documented setting; ``ge``, ``gt`` and ``le`` bound a number. ``required``: it has no usable default.
    ``parts``: the registry that it chooses from by name."""
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, "required": required, "parts": parts}
    if parts is not None:
        metadata["name"], chosen = default, default
        factory, default = lambda: _read_parts(chosen, metadata, ""), dataclasses.MISSING
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def key_of(field: dataclasses.Field[Any]) -> str:
    """The key of a field in recipes: ``async`` is a word of Python's own, so its field is ``async_``."""
    return field.name.removesuffix("_")


def nearest(name: str, known: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` or nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """An instance of the dataclass ``cls`` from a nested mapping, every value checked."""
    hints = typing.get_type_hints(cls)
    fields = {key_of(f): f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments = {}
    for key, value in getattr(cls, "with_current_keys", dict)(values).items():
        where = _below(path, key)
        if key not in fields:
            raise ConfigError(f"unknown key '{where}'{_nearest_key(str(key), cls, path)}")
        name, about = fields[key].name, fields[key].metadata
        if about.get("parts") is not None:
            arguments[name] = _read_parts(value, about, where)
            continue
        arguments[name] = _convert(value, hints[name], where)
        _check_bounds(arguments[name], about, where)
    return cls(**arguments)


def _read_parts(value: Any, about: Mapping[str, Any], where: str) -> Any:
    """The chosen part, or a tuple of parts where the default is one."""
    parts: Parts = about["parts"]
    if isinstance(about["name"], str):
        return parts.read(value, where, about["name"])
    return tuple(parts.read(item, f"{where}[{i}]") for i, item in enumerate(_list_in(value, where)))


def _list_in(value: Any, where: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"'{where}' must be a list, got {value!r}")
    return value


def choose_parts(section: Any, path: str) -> None:
    """Read the parts of a section that Python code made with plain names."""
    for field in dataclasses.fields(section):
        if field.metadata.get("parts") is not None:
            value = _read_parts(getattr(section, field.name), field.metadata, f"{path}.{field.name}")
            object.__setattr__(section, field.name, value)


def _below(path: str, name: Any) -> str:
    """The dotted path of a key, on one line whatever the key is."""
    shown = " ".join(str(name).split())
    return f"{path}.{shown}" if path else shown


def _nearest_key(name: str, cls: type, path: str) -> str:
    """The same name in a deeper section, else the closest one here, else all there are."""
    prefix = f"{path}." if path else ""
    deeper = [doc.path for doc in describe(cls, path) if doc.path.rpartition(".")[2] == name]
    known = sorted(key_of(f) for f in dataclasses.fields(cls))
    close = deeper or [prefix + match for match in difflib.get_close_matches(name, known, n=1, cutoff=0.5)]
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f"; known here: {', '.join(prefix + k for k in known)}"


def _convert(value: Any, hint: Any, where: str) -> Any:
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), where)
    if origin is Literal:
        if isinstance(value, bool) and SWITCH[value] in get_args(hint):
            return SWITCH[value]
        if value not in get_args(hint):
            options = ", ".join(map(str, get_args(hint)))
            raise ConfigError(f"'{where}' must be one of {options}; got {value!r}{_close(value, get_args(hint))}")
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"'{where}' must be a mapping of keys, got {value!r}")
        return build(typing.cast(type, hint), value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"'{where}' must be a mapping, got {value!r}")
        return {str(key): _convert(inner, get_args(hint)[1], _below(where, key)) for key, inner in value.items()}
    if origin is tuple:
        items = enumerate(_list_in(value, where))
        return tuple(_convert(item, get_args(hint)[0], f"{where}[{i}]") for i, item in items)
    return _convert_scalar(value, hint, where)


def _close(value: Any, options: Sequence[Any]) -> str:
    return nearest(value, [o for o in options if isinstance(o, str)]) if isinstance(value, str) else ""


def _convert_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None:
        if types.NoneType in options:
            return None
        raise ConfigError(f"'{where}' must not be empty")
    messages = []
    for option in options:
        if option is types.NoneType:
            continue
        try:
            return _convert(value, option, where)
        except ConfigError as error:
            messages.append(str(error))
    raise ConfigError(messages[0] if len(messages) == 1 else f"'{where}': no accepted form fits {value!r}")


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is float and isinstance(value, str):  # YAML reads 1e-6 (no dot) as one
        with suppress(ValueError):
            value = float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < LARGEST else math.inf
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if hint is str and isinstance(value, datetime.date):  # YAML reads 2026-01-31 as one
        value = value.isoformat()
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"'{where}' must be {SPOKEN.get(hint, str(hint))}, got {value!r}")
    if hint is int and abs(value) > MOST:
        raise ConfigError(f"'{where}' must be {'<= ' if value > 0 else '>= -'}{MOST}, got {value}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"'{where}' must be a finite number, got {value!r}")
    return value


def _check_bounds(value: Any, metadata: Mapping[str, Any], where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<=")):
        bound = metadata.get(name)
        if bound is not None and not getattr(operator, name)(value, bound):
            raise ConfigError(f"'{where}' must be {sign} {bound}, got {value}")


@dataclasses.dataclass(frozen=True)
class KnobDoc:
    path: str
    kind: str
    default: Any
    help: str
    required: bool = False
    part: str = ""  # whose setting it is

    @property
    def shown_default(self) -> str:
        return "required" if self.required else json.dumps(self.default)


def describe(cls: type, path: str = "") -> Iterator[KnobDoc]:
    """Every knob below ``cls`` with its dotted path, for ``--help`` and the reference page."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        where = _below(path, key_of(field))
        if field.metadata.get("parts") is not None:
            yield from _describe_parts(field, where)
            continue
        hint = hints[field.name]
        inner = next((option for option in (hint, *get_args(hint)) if dataclasses.is_dataclass(option)), None)
        if inner is not None:
            yield from describe(typing.cast(type, inner), where)
            continue
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        about = field.metadata
        yield KnobDoc(where, kind_of(hint), default, about.get("help", ""), about.get("required", False))


def _describe_parts(field: dataclasses.Field[Any], where: str) -> Iterator[KnobDoc]:
    """The field, then the settings of each built-in part that it may name."""
    about = field.metadata
    one = isinstance(about["name"], str)
    yield KnobDoc(where, "part" if one else "list of parts", about["name"], about["help"])
    for name, settings in about["parts"].settings():
        for doc in describe(settings, where if one else f"{where}.{name}"):
            yield dataclasses.replace(doc, help=f"{name}: {doc.help}", part=name)


def kind_of(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return " | ".join(map(str, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " | ".join("null" if a is types.NoneType else kind_of(a) for a in get_args(hint))
    if origin is tuple:
        return f"list of {kind_of(get_args(hint)[0])}"
    if origin is dict:
        return "mapping"
    return str(getattr(hint, "__name__", hint))


def to_dict(config: Any) -> Any:
    """Plain dictionaries and lists, ready for YAML or JSON."""
    if isinstance(config, Chosen):
        settings = to_dict(config.settings)
        return {"name": str(config), **settings} if settings else str(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {key_of(f): to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, tuple | list):
        return [to_dict(v) for v in config]
    if isinstance(config, dict):
        return {k: to_dict(v) for k, v in config.items()}
    return config
