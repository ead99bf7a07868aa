"""Where the elements of one JSON list lie in a file, found without parsing them."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator

# A string, or a character that opens, closes or separates. An unclosed string matches its opening quote alone.
TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},"]', re.DOTALL)


class NotOneList(ValueError):
    """The bytes are not one JSON list; the message says why."""


def element_spans(data: mmap.mmap | bytes, start: int = 0) -> Iterator[tuple[int, int]]:
    """First byte and end of each element of the list that begins at or after ``start``. Only strings, brackets and
    commas are looked at: an element may still be invalid JSON."""
    depth, begin, elements = 0, 0, 0
    for token in TOKEN.finditer(data, start):
        sign = token.group()[:1]
        if sign == b'"':
            if token.end() - token.start() == 1:
                raise NotOneList("a string in it is not closed")
            continue
        if sign in b"[{":
            depth += 1
            begin = token.end() if depth == 1 else begin
        elif sign in b"]}":
            depth -= 1
        if depth == 0:
            if sign != b"]":
                break
            if elements or data[begin : token.start()].strip():
                yield begin, token.start()
            if data[token.end() :].strip():
                raise NotOneList("more follows after its closing bracket")
            return
        if sign == b"," and depth == 1:
            yield begin, token.start()
            begin, elements = token.end(), elements + 1
    raise NotOneList("it is not closed")
