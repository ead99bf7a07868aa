"""Functions that a recipe chooses by name: the built-in ones and those a user registers.

    CREDIT = Registry("credit function")

    @CREDIT.register("mine")
    def mine(...): ...

A recipe names a registered function, or one of a user's own module as ``module:function``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from luffy.errors import UserError
from luffy.plugins import import_named, missing_neighbour

T = TypeVar("T", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Functions of one kind by name. ``kind`` is what error messages call them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that adds a function under ``name``; a name that another function has is an error."""

        def add(function: T) -> T:
            known = self._entries.get(name)
            if known is not None and _place(known) != _place(function):  # a module that is loaded again is no clash
                raise UserError(f"there is a {self.kind} {name!r} already; register yours under another name")
            self._entries[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> T:
        """The function of that name, or the one that ``module:function`` names; UserError where there is none."""
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return resolve(name)  # type: ignore[return-value]
        known = ", ".join(self._entries)
        raise UserError(f"unknown {self.kind} {name!r}; known: {known}, or module:function of your own")

    def find(self, name: str, knob: str) -> T:
        """The same; the error says which knob has the name."""
        try:
            return self[name]
        except UserError as error:
            raise UserError(f"'{knob}': {error}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


def _place(function: object) -> tuple[str, str]:
    function = getattr(function, "function", function)  # of a gate or a credit function
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))


def resolve(path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise UserError(f"{path!r} is no import path; write it as module:function")
    try:
        module = import_named(module_name)
    except Exception as error:
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
