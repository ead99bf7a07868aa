"""Parts that a recipe chooses by name: the built-in ones and those a user registers.

A part is a function with a dataclass of settings and facts about itself:

    @dataclass(frozen=True)
    class Penalty:
        length_penalty: float = knob(0.0, "reward that the longest response of a group loses", ge=0)

    @credit_function("mine", settings=Penalty)
    def mine(group, cfg, settings): ...

A recipe names a registered part (``credit: mine``, or ``credit: {name: mine, length_penalty: 0.1}``), or a function of
a user's own module as ``module:function``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from luffy.errors import ConfigError, UserError
from luffy.plugins import import_named, missing_neighbour
from luffy.schema import Chosen, build, nearest


@dataclass(frozen=True)
class NoSettings:
    """The settings of a part that has none."""


@dataclass(frozen=True)
class OldSetting:
    """The value of an old key, which counts only if the chosen part has such a setting."""

    value: Any


@dataclass(frozen=True)
class Part:
    """A function that recipes choose by name, and the dataclass of its settings; subclasses add facts about it."""

    function: Callable[..., Any]
    settings: type = NoSettings

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def settings_for(self, choice: str) -> tuple[Any, ...]:
        """The last argument of a part with settings: those of the choice, or the defaults for a plain name."""
        if self.settings is NoSettings:
            return ()
        return (choice.settings if isinstance(choice, Chosen) else self.settings(),)

    @property
    def is_built_in(self) -> bool:
        return getattr(self.function, "__module__", "").startswith("luffy.")


P = TypeVar("P", bound=Part)
_KINDS: dict[str, Registry[Any]] = {}


class Registry(Generic[P]):
    """Parts of one kind by name.

    ``kind`` is what error messages call them, ``wrap`` makes a part of a function that has no facts, ``home`` has
    the modules or packages with the built-in ones, and ``spelled`` reads a name that has settings in it (None: none).
    ``open_to_all``: a config may have a name that is registered later.
    """

    def __init__(
        self,
        kind: str,
        wrap: Callable[..., P] = Part,  # type: ignore[assignment]
        home: str = "",
        spelled: Callable[[str], Mapping[str, Any] | None] = lambda name: None,
        open_to_all: bool = False,
    ) -> None:
        self.kind, self.wrap, self.spelled, self.open_to_all = kind, wrap, spelled, open_to_all
        self._home, self._entries = home, dict[str, P]()
        _KINDS.setdefault(kind, self)

    def register(self, name: str, **facts: Any) -> Callable[[Any], Any]:
        """A decorator that adds a function, or a part, under ``name``; a name that another has is an error."""

        def add(given: Any) -> Any:
            part = given if isinstance(given, Part) else self.wrap(given, **facts)
            known = (self._entries if part.is_built_in else self.entries).get(name)
            if known is not None and _place(known) != _place(part):  # a module that is loaded again is no clash
                raise UserError(f"there is a {self.kind} {name!r} already; register yours under another name")
            self._entries[name] = part  # type: ignore[assignment]
            return given

        return add

    @property
    def entries(self) -> dict[str, P]:
        """All registered parts, the built-in ones among them."""
        if self._home:
            homes, self._home = self._home.split(), ""
            for home in homes:
                package = import_module(home)
                for inner in iter_modules(getattr(package, "__path__", ())):
                    import_module(f"{home}.{inner.name}")
        return self._entries

    def __getitem__(self, name: str) -> P:
        """The part of that name, or the function that ``module:function`` names; UserError where there is none."""
        if name in self.entries:
            return self.entries[name]
        if ":" in name:
            found = resolve(name)
            return found if isinstance(found, Part) else self.wrap(found)  # type: ignore[return-value]
        raise UserError(f"unknown {self.kind} {name!r}; known: {', '.join(self)}, or module:function of your own")

    def find(self, name: str, knob: str) -> P:
        """The same; the error says which setting has the name."""
        try:
            return self[name]
        except UserError as error:
            raise UserError(f"'{knob}': {error}") from None

    def known(self, name: str) -> P:
        """The registered part of that name; a part without facts where ``module:function`` is not imported yet."""
        return self.entries.get(name) or self.wrap(_not_imported)

    def read(self, value: Any, where: str, default: str = "") -> Chosen:
        """A choice in a config: a name, or a mapping of ``name`` (else ``default``) and settings of that part."""
        if isinstance(value, Chosen):
            return value
        given = dict(value) if isinstance(value, Mapping) else {"name": value}
        name = given.pop("name", default)
        if not isinstance(name, str):
            raise ConfigError(f"'{where}' must be a name, or a mapping with a name and settings; got {name!r}")
        if (spelled := self.spelled(name)) is not None:
            given = {**spelled, **{k: v for k, v in given.items() if not isinstance(v, OldSetting)}}
            name = given.pop("name")
        if name not in self.entries and ":" not in name and not self.open_to_all:
            if not where:
                self[name]  # the error without a config
            known = ", ".join(self)
            raise ConfigError(f"'{where}' must be one of {known}; got {name!r}{nearest(name, list(self))}")
        return Chosen(name, self._settings(name, given, where), self)

    def _settings(self, name: str, given: Mapping[str, Any], where: str) -> Any:
        cls = self.known(name).settings
        fields = {field.name for field in dataclasses.fields(cls)}
        values = {
            key: value.value if isinstance(value, OldSetting) else value
            for key, value in given.items()
            if key in fields or not isinstance(value, OldSetting)
        }
        if values and not fields:
            others = [other for other, known in self.settings() if next(iter(values)) in vars(known)]
            hint = f" ({', '.join(others)} has it)" if others else ""
            raise ConfigError(f"unknown key '{where}.{next(iter(values))}': {name} has no settings{hint}")
        settings: Any = build(cls, values, where)
        if hasattr(settings, "check"):
            settings.check(where)
        return settings

    def settings(self) -> Iterator[tuple[str, type]]:
        """The built-in parts that have settings: name and dataclass of each."""
        for name, part in self.entries.items():
            if part.is_built_in and dataclasses.fields(part.settings):
                yield name, part.settings

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __reduce__(self) -> Any:
        return _registry, (self.kind,)

    def __deepcopy__(self, memo: Any) -> Registry[P]:
        return self


def _registry(kind: str) -> Registry[Any]:
    """What a pickled config finds its parts in."""
    return _KINDS[kind]


def in_module(path: str) -> Callable[..., Any]:
    """The function ``module:function`` of luffy itself, imported when it is called."""

    def function(*args: Any) -> Any:
        module, _, name = path.partition(":")
        return getattr(import_module(module), name)(*args)

    function.__qualname__ = path
    return function


def _not_imported(*args: Any) -> Any:
    raise AssertionError("the facts of this part are known, its function is not")


def _place(part: Part) -> tuple[str, str]:
    function = part.function
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))


def resolve(path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise UserError(f"{path!r} is no import path; write it as module:function")
    try:
        module = import_named(module_name)
    except (Exception, SystemExit) as error:  # a script may end itself
        where = missing_neighbour(error)
        if isinstance(error, ModuleNotFoundError) and not where:
            where = "; modules are found from the folder you are in"
        cause = " ".join(str(error).split()) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(f"cannot import {module_name!r} for {path!r}: {cause[:500]}{where}") from error
    function = getattr(module, function_name, None)
    if function is None:
        raise UserError(f"module {module_name!r} ({getattr(module, '__file__', '?')}) has no {function_name!r}")
    if not callable(function):
        raise UserError(f"{path!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]
