"""Finding the answer in a response: its tail, its boxes, and the text after a marker."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from luffy.types import END_THINK, THINK

# Answers stand at the end. Reading only the tail bounds every later step, whatever the model wrote.
TAIL_CHARACTERS = 4096

_SPECIAL = re.compile(r"[\\{}]")
_BOX_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_GAP = r"(?:[\s$~]|\\[,;:! ]|\\q?quad(?![a-zA-Z])|\\[()\[\]])*"
_AND = r"(?:and|or|\\(?:text|textrm|mathrm)\{\s*,?\s*(?:and|or)\s*\})"
_NAME = r"(?P<name>[a-zA-Z](?:_(?:\w|\{\w+\}))?)\s*=\s*"
_BOX_JOINER = re.compile(rf"{_GAP}(?:[,;]{_GAP}{_AND}?|{_AND}){_GAP}(?:{_NAME})?{_GAP}")
_LONGEST_JOINER = 60
_NAME_BEFORE = re.compile(rf"(?<![a-zA-Z\d_}}^]){_NAME}[$(\[\\\s]*$")

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}


class Box(NamedTuple):
    """One ``\\boxed{...}``: its content and where it lies in the text."""

    content: str
    start: int
    end: int


def after_thought(response: str, in_thought: bool = False) -> str:
    """Text after the last closed thought: empty while a thought is open, everything if there are no tags.
    ``in_thought``: the prompt ended with the tag that opens the first thought.

        >>> after_thought("<think>2 + 3</think>It is 5.")
        'It is 5.'
    """
    _, closed, rest = response.rpartition(END_THINK)
    is_open = THINK in rest or (in_thought and not closed)
    return "" if is_open else rest


def tail(response: str) -> str:
    """Last ``TAIL_CHARACTERS`` characters of a response."""
    return response[-TAIL_CHARACTERS:]


def plain(text: str) -> str:
    """ASCII in place of full-width forms and of decimal digits of other scripts; the length stays."""
    if text.isascii():
        return text
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text.translate(_FULL_WIDTH))


def boxes(text: str) -> list[Box]:
    """Every complete box, by where it starts; an unclosed one (a truncated response) is no answer.

    One pass with a stack of open braces, so that a text full of boxes costs no more than another.
    """
    found: list[Box] = []
    open_braces: list[tuple[int, int] | None] = []  # (start, content start) of a box, None for another brace
    position = 0
    while (special := _SPECIAL.search(text, position)) is not None:
        character, position = special[0], special.start()
        if character == "\\":
            opening = _BOX_OPENING.match(text, position)
            if opening is not None:
                open_braces.append((opening.start(), opening.end()))
            # \{ and \} are printed braces, not grouping ones
            position = opening.end() if opening else position + 1 + (text[position + 1 : position + 2] in ("{", "}"))
            continue
        if character == "{":
            open_braces.append(None)
        elif character == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None:
                found.append(Box(_trimmed(text[opened[1] : position]), opened[0], position + 1))
        position += 1
    return sorted(found, key=lambda box: box.start)


def _trimmed(content: str) -> str:
    r"""Content without spaces around it; one at the end may be LaTeX's own, ``\ ``."""
    short = content.rstrip()
    while len(short) < len(content) and short.endswith("\\") and not short.endswith("\\\\"):
        content = short[:-1]
        short = content.rstrip()
    return short.strip()


def last_boxed(text: str) -> Box | None:
    """The box that starts last: the inner one of two nested boxes."""
    return next(reversed(boxes(text)), None)


def boxed_answer(text: str) -> str | None:
    """Content of the last box, joined with the boxes right before it when the text lists them:
    ``\\boxed{1} or \\boxed{2}`` answers ``1, 2``. Different names before the boxes belong to the answer:
    ``x = \\boxed{1}, y = \\boxed{2}`` answers ``x = 1, y = 2``."""
    found = boxes(text)
    if not found:
        return None
    listed = [found.pop()]
    while found and _is_listed(text, found[-1], listed[-1]):
        listed.append(found.pop())
    listed.reverse()
    contents = [box.content for box in listed]
    names = [_name_before(text, box) for box in listed] if len(listed) > 1 else []
    if names and all(names) and len(set(names)) == len(names):
        return ", ".join(f"{name} = {content}" for name, content in zip(names, contents, strict=True))
    return ", ".join(dict.fromkeys(contents))


def _is_listed(text: str, box: Box, next_box: Box) -> bool:
    gap = text[box.end : next_box.start]
    if box.end >= next_box.start:  # one right behind the other, or one in the other
        return box.end == next_box.start
    return len(gap) <= _LONGEST_JOINER and _BOX_JOINER.fullmatch(gap) is not None


def _name_before(text: str, box: Box) -> str | None:
    name = _NAME_BEFORE.search(text[max(0, box.start - _LONGEST_JOINER) : box.start])
    return name["name"] if name and "=" not in box.content else None
