"""The index finds what a search of all texts finds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from luffy.rollout.native import draft_index
from luffy.rollout.native.draft_index import BEFORE, CANDIDATES, LEAST, MOST, NONE, Chunk, DraftIndex

TEXTS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=14), st.integers(0, 4)), min_size=1, max_size=6
)


def searched(chunks, problem, context, count):
    """Tokens matched and the draft, of the newest CANDIDATES places that the two newest tokens stand before."""
    newest = [token for token in context if token != BEFORE]
    found = []
    for chunk in chunks:
        tokens = chunk.tokens.tolist()
        for place in range(max(chunk.known, LEAST), len(tokens)):
            matched = 0
            while matched < min(place, len(newest), MOST) and tokens[place - 1 - matched] == newest[-1 - matched]:
                matched += 1
            if chunk.problem == problem and matched >= LEAST:
                found.append((matched, (tokens[place : place + count] + [NONE] * count)[:count]))
    return max(reversed(found[-CANDIDATES:]), key=lambda pair: pair[0], default=(0, [NONE] * count))


@given(TEXTS, st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=10)), min_size=1, max_size=4))
def test_every_row_gets_the_longest_match_of_its_problem(texts, rows):
    chunks = [Chunk(problem, np.array(tokens, dtype=np.int32), known) for problem, tokens, known in texts]
    contexts = np.full((len(rows), MOST), BEFORE, dtype=np.int32)
    for context, (_, newest) in zip(contexts, rows, strict=True):
        if newest:
            context[-len(newest[-MOST:]) :] = newest[-MOST:]
    matched, drafts = DraftIndex(chunks).find(np.array([problem for problem, _ in rows]), contexts, 3)
    expected = [searched(chunks, problem, c.tolist(), 3) for (problem, _), c in zip(rows, contexts, strict=True)]
    assert list(zip(matched.tolist(), drafts.tolist(), strict=True)) == expected


def test_large_ids_do_not_run_into_one_another():
    most = (1 << draft_index._TOKEN_BITS) - 1
    index = DraftIndex(
        [Chunk(1, np.array([5, most, 7], dtype=np.int32)), Chunk(2, np.array([4, 3, 8], dtype=np.int32))]
    )
    contexts = np.full((3, MOST), BEFORE, dtype=np.int32)
    contexts[:, -2:] = [(5, most), (5, most), (4, 3)]
    matched, drafts = index.find(np.array([1, 2, 2]), contexts, 2)
    assert matched.tolist() == [2, 0, 2] and drafts.tolist() == [[7, NONE], [NONE, NONE], [8, NONE]]


def test_places_of_the_next_token_hide_none_and_the_newest_equal_one_counts():
    tokens = [1, 2, 9, *[1, 3, 8] * CANDIDATES, *(token for last in range(10, 210) for token in (last, 4, 5, last))]
    contexts = np.full((2, MOST), BEFORE, dtype=np.int32)
    contexts[:, -2:] = [(1, 2), (4, 5)]
    matched, drafts = DraftIndex([Chunk(0, np.array(tokens, dtype=np.int32))]).find(np.array([0, 0]), contexts, 1)
    assert matched.tolist() == [2, 2] and drafts.tolist() == [[9], [209]]
