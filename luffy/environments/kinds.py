"""Environments by the name that a recipe gives: registered ones, or a class or function of a user's own.

    environment: {name: calculator, max_turns: 8}
    environment: {name: my_tools.py:Shop, arguments: {budget: 20}}
    environment: {name: gymnasium:make, arguments: {id: FrozenLake-v1}}

A built-in one is a class with tools (``tools.py``), with ``reset`` and ``step`` (``steps.py``), or with luffy's own
protocol, or a function that returns such an object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from luffy.environments.answers import DEFAULT_REPLY_CHARS
from luffy.environments.protocol import Environment
from luffy.environments.steps import StepEnvironment
from luffy.environments.tool_schemas import Schema, schemas_of, tool_names
from luffy.environments.tools import ToolEnvironment
from luffy.errors import ConfigError, UserError
from luffy.plugins import in_file
from luffy.registry import NoSettings, Part, Registry
from luffy.rewards.worker import describe
from luffy.schema import Chosen, build

Kind = Literal["own", "tools", "steps"]
Factory = Callable[..., Any]
SECTION = "environment"  # of a recipe


@dataclass(frozen=True)
class EnvironmentPart(Part):
    """A class or function that makes the object of one episode. ``own_reward``: it scores its episodes."""

    own_reward: bool = False


HOMES = "luffy.environments.built_in luffy.environments.openenv luffy.environments.verifiers"
ENVIRONMENTS: Registry[EnvironmentPart] = Registry("environment", EnvironmentPart, home=HOMES, open_to_all=True)


def environment(name: str, settings: type = NoSettings, **facts: bool) -> Callable[[Factory], Factory]:
    """Register a class, or a function, that makes the object of one episode; with ``settings`` (a dataclass) it gets
    them as its argument. Fact: ``own_reward`` (its episodes come with rewards, default False)."""
    return ENVIRONMENTS.register(name, settings=settings, **facts)


def kind_of(thing: Any) -> Kind:
    """What an object or a class is, by the methods it has; a UserError where it is no environment.

    ``reset`` and ``step`` make it one with steps, unless it has ``get_reward``: then ``step`` is one of its tools."""

    def has(*names: str) -> bool:
        return all(callable(getattr(thing, name, None)) for name in names)

    name = thing.__name__ if isinstance(thing, type) else type(thing).__name__
    if has("start", "reply"):
        if not has("close"):
            raise UserError(f"{name} has start and reply, but no close; add it, if only to do nothing")
        return "own"
    if has("step") and (has("init") or has("reset")) and not has("get_reward"):
        return "steps"
    if has("step") and not has("get_reward") and list(tool_names(thing)) == ["step"]:
        raise UserError(f"{name} has step, but no reset; add it, if only to return the first text")
    if tool_names(thing):
        return "tools"
    raise UserError(
        f"{name} is no environment: give it public methods (tools, with type hints and docstrings), "
        "or reset and step, or start, reply, reward and close"
    )


class Maker:
    """Makes the environments of a run, around the objects of a class or a factory. ``tools``: JSON schemas, as chat
    templates take them. ``gives_reward``: whether its environments score an episode, or its turns, themselves."""

    def __init__(self, factory: partial[Any], max_reply_chars: int, own_reward: bool) -> None:
        self._factory, self._most, self._own_reward = factory, max_reply_chars, own_reward

    @cached_property
    def _sample(self) -> tuple[Kind, dict[str, Schema], bool]:
        """The kind, the tools, and whether there is a reward: of the class, or of an object that is made for this."""
        if _takes_row(self._factory.func):
            return "steps", {}, True
        cls = self._factory.func if isinstance(self._factory.func, type) else None
        thing = self._made_once() if cls is None else cls
        try:
            kind = kind_of(thing)
            rewarded = kind == "steps" or callable(getattr(thing, "reward" if kind == "own" else "get_reward", None))
            return kind, schemas_of(thing) if kind == "tools" else _tools_of(thing), rewarded
        finally:
            if cls is None and hasattr(thing, "close"):
                made(kind_of(thing), thing, {}, self._most).close()

    def _made_once(self) -> Any:
        """An object that is looked at before a run begins."""
        try:
            return self._factory()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            name = getattr(self._factory.func, "__name__", "the function")
            raise UserError(f"'{SECTION}.name': {name} made no environment: {describe(error)}") from error

    @property
    def tools(self) -> tuple[Schema, ...]:
        return tuple(self._sample[1].values())

    @property
    def gives_reward(self) -> bool:
        return self._own_reward or self._sample[2]

    def make(self) -> Environment:
        """An environment for one episode."""
        if _takes_row(self._factory.func):
            given = self._factory.keywords
            return StepEnvironment(None, self._most, lambda row: self._factory(**{"extras": row, **given}))
        return made(self._sample[0], self._factory(), self._sample[1], self._most)


def made(kind: Kind, thing: Any, schemas: Mapping[str, Schema], max_reply_chars: int) -> Environment:
    """The environment around an object."""
    if kind == "own":
        if hasattr(thing, "max_reply_chars"):
            thing.max_reply_chars = max_reply_chars
        return thing  # type: ignore[no-any-return]
    if kind == "steps":
        return StepEnvironment(thing, max_reply_chars)
    return ToolEnvironment(thing, schemas, max_reply_chars)


def maker_for(
    choice: str | Factory,
    arguments: Mapping[str, Any] | None = None,
    max_reply_chars: int = DEFAULT_REPLY_CHARS,
) -> Maker:
    """The maker of the environment that a recipe names, or of a class or function itself. Checks the arguments and
    describes the tools, so that a mistake shows before a run begins."""
    given = dict(arguments or {})
    part = _part(choice) if isinstance(choice, str) else EnvironmentPart(choice)
    maker = Maker(_factory(choice, part, given), max_reply_chars, part.own_reward)
    assert maker.tools is not None  # a mistake in the class is an error here
    if part.is_built_in:  # and so is what this machine cannot do
        maker.make().close()
    return maker


def _part(name: str) -> EnvironmentPart:
    """The registered environment, or the one that ``module:name`` or ``file.py:name`` names."""
    file, colon, attribute = name.rpartition(":")
    if not (colon and file.endswith(".py")):
        return ENVIRONMENTS.find(name, f"{SECTION}.name")
    return EnvironmentPart(in_file(file, attribute, f"{SECTION}.name", "class or function"))


def _factory(choice: str | Factory, part: EnvironmentPart, given: dict[str, Any]) -> partial[Any]:
    """What makes an object, without arguments."""
    if part.settings is not NoSettings:
        chosen = choice.settings if isinstance(choice, Chosen) and not given else None
        settings = chosen or build(part.settings, given, f"{SECTION}.arguments")
        if hasattr(settings, "check"):
            settings.check(f"{SECTION}.arguments")
        return partial(part.function, settings)
    try:
        row: dict[str, Any] = {"extras": {}} if _takes_row(part.function) else {}
        inspect.signature(part.function).bind(**{**row, **given})
    except TypeError as error:
        name = getattr(part.function, "__name__", choice)
        raise ConfigError(f"'{SECTION}.arguments' do not fit {name}: {error}") from None
    except ValueError:  # a builtin without a signature
        pass
    return partial(part.function, **given)


def _takes_row(function: Factory) -> bool:
    """Whether it makes its object from the row of an episode, as SkyRL-gym does."""
    if getattr(function, "__name__", "") == "make" and function.__module__.startswith("skyrl_gym"):
        return True
    try:
        return "extras" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _tools_of(thing: Any) -> dict[str, Schema]:
    """The schemas that an object of luffy's own protocol lists."""
    tools = getattr(thing, "tools", ())
    try:
        return {tool["function"]["name"]: tool for tool in tools} if isinstance(tools, tuple | list) else {}
    except (KeyError, TypeError):
        raise UserError(
            "an environment's 'tools' must be JSON schemas: "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
        ) from None
