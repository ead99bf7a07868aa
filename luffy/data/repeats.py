"""Which problems are there twice, by hashes of their prompts: eight bytes a problem, and no second look at the data."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np

from luffy.types import Message


def text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def prompt_hash(prompt: str | tuple[Message, ...]) -> int:
    """The same for prompts that differ in whitespace alone; a question is the same as a chat of it alone."""
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return text_hash("\n".join(f"{turn.role}: {' '.join(turn.content.split())}{_calls(turn)}" for turn in chat))


def _calls(turn: Message) -> str:
    return "".join(f" {call.name}({call.arguments})" for call in turn.tool_calls)


def repeated(hashes: array[int]) -> list[tuple[int, int]]:
    """Places of the problems that repeat an earlier one, each with the place of the first of its kind."""
    keys = np.asarray(hashes, dtype=np.uint64)
    _, first, kind = np.unique(keys, return_index=True, return_inverse=True)
    earlier = first[kind]
    places = np.flatnonzero(earlier < np.arange(len(keys)))
    return list(zip(places.tolist(), earlier[places].tolist(), strict=True))


def shared(hashes: array[int], others: array[int]) -> list[tuple[int, int]]:
    """Places of ``hashes`` that are among ``others`` too, each with its first place there."""
    wanted = np.asarray(hashes, dtype=np.uint64)
    known, first = np.unique(np.asarray(others, dtype=np.uint64), return_index=True)
    found = np.flatnonzero(np.isin(wanted, known))
    return list(zip(found.tolist(), first[np.searchsorted(known, wanted[found])].tolist(), strict=True))
