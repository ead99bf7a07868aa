"""Passages are found by their words; a file that cannot be read says where."""

import json

import pytest

from luffy.environments.passages import read_passages
from luffy.errors import DataError

pytest.importorskip("rank_bm25")

TEXTS = ["The lion sleeps.", "A ship sails to the island.", "The ship sinks; the island does not.", "Gold!"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "passages.jsonl"
    path.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)) + "\n\n")
    return path


def test_passages_with_the_words_come_first(file):
    passages = read_passages(str(file), "text")
    assert passages.find("ISLAND, sails?", 3) == [TEXTS[1], TEXTS[2]]
    assert passages.find("the island", 9)[-1] == TEXTS[0], "the word that most have counts least"
    assert passages.find("gold", 1) == [TEXTS[3]] and passages.find("the", 1) == passages.find("the", 9)[:1]
    assert passages.find("tiger", 3) == passages.find("", 3) == []
    assert read_passages(str(file), "text") is passages


def test_equal_passages_keep_their_order(tmp_path):
    path = tmp_path / "same.jsonl"
    path.write_text('{"t": "a b", "n": 1}\n{"t": "b a"}\n{"t": "c"}\n')
    assert read_passages(str(path), "t").find("b a", 9) == ["a b", "b a"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', r"bad.jsonl, line 2: no text in column 'text'; found: txt"),
        ('{"text": 3}\n', "line 1: no text in column 'text'"),
        ("[1]\n", "line 1: no text .* found: list"),
        ("{\n", "line 1: no valid JSON"),
        ("[" * 100_000, "line 1: no valid JSON"),
        ('{"text": "a"}\n{"text": "\udcff"}\n', "line 2: no valid JSON"),  # no UTF-8
        ("\n", "no text to search in column 'text'"),
    ],
)
def test_a_bad_file_says_where(tmp_path, text, why):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=why):
        read_passages(str(path), "text")
    with pytest.raises(DataError, match="no such file"):
        read_passages(str(tmp_path / "none.jsonl"), "text")
