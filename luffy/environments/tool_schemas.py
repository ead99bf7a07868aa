"""The tools of an object: its public methods as JSON schemas, and the arguments of a call checked against them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from luffy.environments.answers import Faulty
from luffy.errors import UserError

NOT_TOOLS = ("reset", "get_reward", "close")
SPOKEN = {
    "string": "text", "integer": "a whole number", "number": "a number", "boolean": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip

Schema = Mapping[str, Any]


def tool_names(thing: Any) -> list[str]:
    """Public methods of a class or an object, in alphabetical order as TRL lists them."""
    cls = thing if isinstance(thing, type) else type(thing)
    kinds = (staticmethod, classmethod)
    return [
        name
        for name in sorted(dir(cls))
        if not name.startswith("_")
        and name not in NOT_TOOLS
        and (inspect.isfunction(found := inspect.getattr_static(cls, name)) or isinstance(found, kinds))
    ]


def schemas_of(thing: Any) -> dict[str, Schema]:
    """The schema of each tool, by its name."""
    cls = thing if isinstance(thing, type) else type(thing)
    return {name: _schema(cls, name) for name in tool_names(cls)}


def _schema(cls: type, name: str) -> Schema:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    method, where = getattr(cls, name), f"{cls.__name__}.{name}"
    try:
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
    except ValueError:  # a builtin without a signature
        raise UserError(f"the tool {where} does not name its arguments: {cls.__name__} is no class of tools") from None
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}:
        raise UserError(f"the tool {where} must name its arguments, without *, ** and /; or begin its name with _")
    try:
        return get_json_schema(method)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        why = " ".join(" ".join(str(part) for part in error.args).split())
        raise UserError(
            f"{where} cannot be described as a tool: {why}. Give every argument a type hint and a line below "
            "'Args:' in the docstring, or begin the name with _ if it is no tool"
        ) from None


def checked(arguments: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """The arguments of a call with the types of the schema; Faulty says what is wrong with them."""
    parameters = schema["function"]["parameters"]
    known, needed = parameters["properties"], parameters.get("required", [])
    missing = [name for name in needed if name not in arguments]
    unexpected = [str(name)[:40] for name in arguments if name not in known]
    if missing or unexpected:
        wrong = [f"missing argument {name}" for name in missing] + [f"no argument {name}" for name in unexpected]
        raise Faulty("wrong_arguments", f"{', '.join(wrong)}; arguments: {', '.join(known) or 'none'}")
    try:
        return {name: fitted(value, known[name], name) for name, value in arguments.items()}
    except ValueError as error:
        raise Faulty("wrong_arguments", str(error)) from None


def fitted(value: Any, schema: Schema, where: str) -> Any:
    """A JSON value as the schema wants it; a whole number for a float, and 2.0 for 2, lose nothing. A ValueError where
    it does not fit."""
    if "anyOf" in schema:
        return _first_that_fits(value, schema, where)
    if value is None and schema.get("nullable"):
        return None
    types = schema.get("type")
    if types is not None:
        value = _of_type(value, [types] if isinstance(types, str) else types, where)
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{where} must be one of {', '.join(map(str, schema['enum']))}")
    return _with_inner(value, schema, where)


def _first_that_fits(value: Any, schema: Schema, where: str) -> Any:
    if value is None and schema.get("nullable"):
        return None
    for option in schema["anyOf"]:
        try:
            return fitted(value, option, where)
        except ValueError:
            continue
    raise ValueError(f"{where} has a type that it cannot have")


def _of_type(value: Any, types: list[str], where: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    found = {
        "string": isinstance(value, str),
        "integer": is_number and isinstance(value, int),
        "number": is_number and isinstance(value, float),
        "boolean": isinstance(value, bool),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "null": value is None,
    }
    if any(found[kind] for kind in types if kind in found) or "any" in types:
        return value
    if is_number and "number" in types and abs(value) <= 1 << 53:
        return float(value)
    if is_number and "integer" in types and float(value).is_integer():
        return int(value)
    raise ValueError(f"{where} must be {' or '.join(SPOKEN.get(kind, kind) for kind in types)}")


def _with_inner(value: Any, schema: Schema, where: str) -> Any:
    """The items of a list and the values of an object, each as the schema wants it."""
    if isinstance(value, list) and "items" in schema:
        return [fitted(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, list) and "prefixItems" in schema:
        inner = schema["prefixItems"]
        if len(value) != len(inner):
            raise ValueError(f"{where} must have {len(inner)} items")
        return [fitted(item, one, f"{where}[{i}]") for i, (item, one) in enumerate(zip(value, inner, strict=True))]
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), Mapping):
        return {key: fitted(item, schema["additionalProperties"], f"{where}.{key}") for key, item in value.items()}
    return value
