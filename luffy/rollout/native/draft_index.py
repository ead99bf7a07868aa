"""Where texts go on: for many rows at once, the place in known texts behind the same tokens.

    a text of the problem   ... a b c d e ...        a row   ... x b c
                                     ^ a place: "b c" stands before it too, so the row's draft is "d e"

Places are sorted by problem and the two tokens before them, so that numpy looks up all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Numbers = NDArray[np.int64]

LEAST, MOST = 2, 8  # tokens before a place: that must be the row's, and that are compared
CANDIDATES = 8  # places that are compared, the newest
BYTES = 24  # of memory for each token
NONE = -1  # where there is no token
BEFORE = -2  # the same in front of a row's first token
LONGEST_DRAFT = 64
_TOKEN_BITS = 21  # of a key; a vocabulary is smaller


@dataclass(frozen=True)
class Chunk:
    """Tokens of a text of a problem; the first ``known`` are there for those behind them, and no place."""

    problem: int
    tokens: Ids
    known: int = 0


class DraftIndex:
    """The places of some chunks, the newest last."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        gap = np.full(MOST, NONE, dtype=np.int32)  # no text goes on in the next one
        end_gap = np.full(LONGEST_DRAFT, NONE, dtype=np.int32)
        self._tokens = np.concatenate([*(part for chunk in chunks for part in (gap, chunk.tokens)), end_gap])
        problems = np.zeros(len(self._tokens), dtype=np.int64)
        is_place = np.zeros(len(self._tokens), dtype=bool)
        end = 0
        for chunk in chunks:
            start = end + MOST
            end = start + len(chunk.tokens)
            problems[start:end] = chunk.problem
            is_place[start + max(chunk.known, LEAST) : end] = True
        places = np.flatnonzero(is_place)
        keys = _keys(problems[places], self._tokens[places - 2], self._tokens[places - 1])
        order = np.argsort(keys, kind="stable")
        self._keys, self._places = keys[order], places[order].astype(np.int32)

    def __len__(self) -> int:
        return len(self._places)

    def find(self, problems: Numbers, contexts: Ids, count: int) -> tuple[Numbers, Ids]:
        """For rows of ``problems`` with the newest tokens ``contexts`` [B, MOST] (BEFORE the first): how many of them
        [B] stand before the place that has most, 0 where there is none, and the ``count`` tokens behind it [B, count],
        NONE after a text's end."""
        if not len(self):
            return np.zeros(len(problems), dtype=np.int64), np.full((len(problems), count), NONE, dtype=np.int32)
        keys = _keys(problems, contexts[:, -2], contexts[:, -1])
        first, end = np.searchsorted(self._keys, np.stack((keys, keys + 1)))
        at = end[:, None] - 1 - np.arange(CANDIDATES)
        places = self._places[np.maximum(at, 0)]
        same = self._tokens[places[:, :, None] - np.arange(1, MOST + 1)] == contexts[:, None, ::-1]
        matched = np.logical_and.accumulate(same, axis=2).sum(axis=2)
        matched[(at < first[:, None]) | (matched < LEAST)] = 0
        rows, best = np.arange(len(keys)), matched.argmax(axis=1)
        following = self._tokens[places[rows, best][:, None] + np.arange(count)]
        most = matched[rows, best]
        gone = np.logical_or.accumulate((following == NONE) | (most == 0)[:, None], axis=1)
        return most, np.where(gone, NONE, following)


def _keys(problems: Numbers, before: Ids, last: Ids) -> Numbers:
    keys: Numbers = (problems << 2 * _TOKEN_BITS) | (before.astype(np.int64) << _TOKEN_BITS) | last
    return keys
