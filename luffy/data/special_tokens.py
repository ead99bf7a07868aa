"""Special tokens that a user's text spells out (``<|im_end|>``): found, marked, and read as plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from luffy.types import END_THINK, THINK

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # code points that no text has: around the id of a token that is to be read as text
MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class SpecialTokens:
    """The special tokens of a tokenizer: ``texts`` by id and ``ids`` by text.

    Those that mark a thought are left out: traces spell them out. ``knows_thoughts``: the tokenizer has tokens for
    them; ``hides_thoughts``: they are special, so that a decoded response does not show them.
    """

    def __init__(self, tokenizer: Any) -> None:
        known = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        found = {token: text for token, text in (known | dict(named)).items() if token is not None and text}
        self.knows_thoughts = THINK in map(str, tokenizer.added_tokens_decoder.values())
        self.hides_thoughts = END_THINK in found.values()
        self.texts = {token: text for token, text in found.items() if text not in (THINK, END_THINK)}
        self.ids = {text: token for token, text in self.texts.items()}
        self._first_letters = {text[0] for text in self.ids}

    @cached_property
    def spelled(self) -> re.Pattern[str]:
        """Matches any special token that is spelled out."""
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def mark(self, text: str) -> str:
        """``text`` with a mark in place of every special token that is spelled out in it."""
        text = without_marks(text)
        if not any(first in text for first in self._first_letters):
            return text
        return self.spelled.sub(lambda found: f"{OPEN}{self.ids[found[0]]}{CLOSE}", text)

    def without_end(self, text: str, eos_ids: Sequence[int]) -> str:
        """``text`` without the end tokens that are spelled out at its end."""
        ends = [re.escape(self.texts[token]) for token in eos_ids if token in self.texts]
        return re.sub(rf"(?:(?:{'|'.join(ends)})\s*)+\Z", "", text) if ends else text


def without_marks(text: str) -> str:
    """A user's text cannot carry marks of ours."""
    return text.replace(OPEN, "\ufffd") if OPEN in text else text
