"""Text of models and datasets made safe to show: escaped, and with nothing invisible in it.

HTML is built with ``Markup.format``, which escapes every value that is not Markup itself.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from markupsafe import Markup, escape

# characters that change the order or the look of others without showing themselves
_SEPARATORS = {"\u2028", "\u2029"}
_KEPT = {"\n", "\t", "\u200d"}  # the last one joins emoji


def show(text: str) -> Markup:
    """Escaped, with control, direction and lone surrogate characters written out as U+XXXX."""
    if text.isprintable():
        return escape(text)
    written = Markup('<span class="ctl">U+{:04X}</span>')
    return Markup("").join(written.format(ord(c)) if is_hidden(c) else escape(c) for c in text)


def legible(text: str) -> str:
    """Plain text with hidden characters written out, for attributes and labels; not escaped."""
    return text if text.isprintable() else "".join(f"U+{ord(c):04X}" if is_hidden(c) else c for c in text)


def is_hidden(character: str) -> bool:
    if character in _KEPT:
        return False
    return unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn"} or character in _SEPARATORS


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "\u2026"


def shorten_middle(text: str, limit: int) -> str:
    """Names of one family often differ at their end: keep both ends."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}\u2026{text[-tail:]}"


LARGE = 1e15  # too many digits to read


def number(value: float, digits: int = 3) -> str:
    """A number as text: thousands apart and no decimals from 1,000 on, a power of ten from ``LARGE`` on, never a minus
    before zero."""
    if abs(value) >= LARGE:
        return f"{value:.3g}".replace("-", "\u2212")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    written = f"{value:.{digits}f}"
    return written.lstrip("-") if float(written) == 0 else written.replace("-", "\u2212")


_SLACK = 8  # characters that may precede a token: a space, or what half-character tokens before it make up


def show_seconds(value: float) -> str:
    """Seconds with about three significant digits."""
    return number(value, 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0)


def aligned(tokens: Sequence[str], response: str) -> list[tuple[str, bool]]:
    """Each token's part of the response, and whether it is special (not part of the text).

    A token decoded alone can lack the space before it, or be half a character; the whole response has
    both right. Where the two cannot be brought together, the tokens are shown as they are.
    """
    parts: list[tuple[str, bool]] = []
    at, half = 0, -1  # ``half``: the last token that is part of a character, until its text is known
    for token in tokens:
        found = response.find(token, at, at + len(token) + _SLACK)
        if found == at or (found > at and "\ufffd" not in token):
            start = found if half >= 0 else at
            if half >= 0:
                parts[half] = response[at:found], False
            parts.append((response[start : found + len(token)], False))
            at, half = found + len(token), -1
        elif "\ufffd" in token:
            half = len(parts)
            parts.append(("", False))
        else:
            parts.append((token, True))
    if half >= 0:
        parts[half], at = (response[at:], False), len(response)
    return parts if at == len(response) else [(token, False) for token in tokens]
