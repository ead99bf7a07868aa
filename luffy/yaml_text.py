"""YAML of strangers: read in a time that its length bounds, refused where a short text stands for endless values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from luffy.errors import ConfigError

MOST_BYTES = 1 << 20  # the parser takes seconds for them
MOST_VALUES = 10_000
DEEPEST = 200  # brackets within brackets
LONGEST_NUMBER = 1_000  # characters: 1:59:59:... is a number to base 60
TAG = "tag:yaml.org,2002:"
MERGE_TAG, NUMBER_TAGS = f"{TAG}merge", (f"{TAG}int", f"{TAG}float")
# The parser's own, and what escapes it: a 13th month, 5,000 digits, bytes that are no text, deep nesting, `!!bool x`,
# a float to base 60 beyond all floats.
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError, OverflowError)


class _Loader(yaml.SafeLoader):
    """A SafeLoader that raises a ValueError where a mapping names a key twice, of which the parser would keep the last,
    and where a text has too many values, also through its merges (``<<``). What a merge brings may be named again."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = self.merged = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > 2 * MOST_VALUES + 1:  # keys count too
            raise ValueError(f"more than {MOST_VALUES:,} values")
        return super().compose_node(parent, index)

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag in NUMBER_TAGS and len(node.value) > LONGEST_NUMBER:
            where = f"the number in line {node.start_mark.line + 1}"
            raise ValueError(f"{where} has more than {LONGEST_NUMBER:,} characters; quote it if it is a text")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE_TAG:
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                raise ValueError(f"key {key.value!r} in line {line} is there already, in line {lines[name]}; keep one")
            lines[name] = line
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Carry out the merges of a mapping, once their size is known: each may hold mappings that merge others."""
        for inner in _merged_into(node):
            self.flatten_mapping(inner)
            self.merged += len(inner.value)
            if self.merged > MOST_VALUES:
                raise ValueError(f"merges (<<) bring more than {MOST_VALUES:,} values; name those that are needed")
        super().flatten_mapping(node)


def _merged_into(node: yaml.MappingNode) -> Iterator[yaml.MappingNode]:
    for key, value in node.value:
        if key.tag == MERGE_TAG:
            for inner in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(inner, yaml.MappingNode):
                    yield inner


def read_yaml(text: str, where: str) -> Any:
    """What a YAML text says. One of ``YAML_ERRORS`` where it is not valid; a ConfigError that names ``where`` if it is
    endless through its aliases."""
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{where}: {len(text):,} characters of YAML, at most {MOST_BYTES:,} are read; shorten it")
    depth = deepest = 0
    for mark in re.findall(r"[\[\]{}]", text):  # the parser's time for brackets within brackets is their depth squared
        depth = max(depth + (1 if mark in "[{" else -1), 0)
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise ValueError(f"brackets lie {deepest} deep in each other, at most {DEEPEST} are read")
    value = yaml.load(text, _Loader)
    check_size(value, where)
    return value


def parse_yaml(path: Path) -> Any:
    """What a YAML file says; a ConfigError where it cannot be read, or is endless through its aliases."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_BYTES + 1)
        return read_yaml(text, str(path))
    except ConfigError:
        raise
    except YAML_ERRORS as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def check_size(value: Any, where: str) -> None:
    """Refuse what is too large to read: more values than a recipe has (aliases, ``*name``, can make a short text
    endless), and numbers of more digits than Python writes, which no later error could quote."""
    waiting, seen = [value], 0
    while waiting:
        seen += 1
        if seen > MOST_VALUES:
            raise ConfigError(f"{where}: more than {MOST_VALUES:,} values; an alias (*name) must not repeat itself")
        inner = waiting.pop()
        if isinstance(inner, Mapping):
            for key in inner:
                _check_digits(key, where)
            inner = inner.values()
        _check_digits(inner, where)
        waiting.extend(() if isinstance(inner, str | bytes) or not hasattr(inner, "__iter__") else inner)


def _check_digits(value: Any, where: str) -> None:
    if isinstance(value, int) and abs(value) >= 10**LONGEST_NUMBER:
        digits = int(value.bit_length() * math.log10(2))
        raise ConfigError(f"{where}: a number of about {digits:,} digits; write one of at most {LONGEST_NUMBER:,}")
