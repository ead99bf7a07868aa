"""Finding the answer in a response: its tail, its boxes, and the text after a marker."""

from __future__ import annotations

import re
from typing import NamedTuple

# Answers stand at the end. Reading only the tail bounds every later step, whatever the model wrote.
TAIL_CHARACTERS = 4096

_SPECIAL = re.compile(r"[\\{}]")
_BOX_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BOX_JOINER = re.compile(r"[\s$;]*(?:,|and|or|\\text\{\s*(?:and|or)\s*\})[\s$;,]*(?:and|or)?\s*\$?(?:[a-zA-Z]\s*=\s*)?")
_LONGEST_JOINER = 40


THOUGHT_BEGINS, THOUGHT_ENDS = "<think>", "</think>"


class Box(NamedTuple):
    """One ``\\boxed{...}``: its content and where it lies in the text."""

    content: str
    start: int
    end: int


def after_thought(response: str) -> str:
    """What stands after the last closed thought; nothing when a thought is still open, and all of a response without
    tags. The tag that opens the first thought may be missing, where the prompt ended with it."""
    rest = response.rpartition(THOUGHT_ENDS)[2]
    return "" if THOUGHT_BEGINS in rest else rest


def tail(response: str) -> str:
    return response[-TAIL_CHARACTERS:]


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
    """Without spaces around it; one at the end may be LaTeX's own, ``\\ ``."""
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
    ``\\boxed{1} or \\boxed{2}`` answers ``1, 2``."""
    found = boxes(text)
    if not found:
        return None
    box = found.pop()
    contents = [box.content]
    while found and _is_joiner(text[found[-1].end : box.start]):
        box = found.pop()
        contents.append(box.content)
    return ", ".join(dict.fromkeys(reversed(contents)))


def _is_joiner(gap: str) -> bool:
    return len(gap) <= _LONGEST_JOINER and _BOX_JOINER.fullmatch(gap) is not None
