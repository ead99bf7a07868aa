"""The built-in environments, each played for a turn."""

import json
from importlib.util import find_spec

import pytest

from luffy.environments import built_in
from luffy.environments.built_in import read_passages
from luffy.environments.call_formats import read_turn
from luffy.environments.kinds import ENVIRONMENTS, maker_for
from luffy.environments.sandbox import Sandbox, without_network
from luffy.errors import ConfigError, DataError, UserError
from luffy.types import Problem


def said_by(name, text, **arguments):
    """What an environment says to one turn in the hermes format."""
    environment = maker_for(name, arguments).make()
    environment.start(Problem("p", "", ""), 0)
    reply = environment.reply(read_turn(text))
    environment.close()
    return reply.messages[0].content, reply.faults


def call(name, key, value):
    return f'<tool_call>{{"name": "{name}", "arguments": {{"{key}": "{value}"}}}}</tool_call>'


def test_they_are_registered():
    names = [name for name, part in ENVIRONMENTS.entries.items() if part.function.__module__ == built_in.__name__]
    assert names == ["chain", "calculator", "python", "search"]


def test_the_calculator_and_the_chain():
    assert said_by("calculator", call("calculate", "expression", "1/4 + 1")) == ("1.25", ())
    said = "error: ValueError: division by zero"
    assert said_by("calculator", call("calculate", "expression", "1/0")) == (said, ("tool_raised",))
    add = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert said_by("chain", add) == ("5", ())


@pytest.mark.skipif(without_network() is None, reason="neither unshare nor sandbox-exec takes the network away here")
def test_python_runs_in_the_sandbox():
    allow = ["memory"]  # macOS does not limit it
    assert said_by("python", call("run", "code", "2 ** 10"), allow=allow) == ("1024", ())
    text, faults = said_by("python", call("run", "code", "1/0"), allow=allow)
    assert text == "ZeroDivisionError: division by zero (line 1)" and faults == ()
    with pytest.raises(ConfigError, match="'environment.arguments.allow' may name network and memory; got 'all'"):
        maker_for("python", {"allow": ["all"]})


def test_python_is_refused_before_a_run(monkeypatch):
    def refuse(*_):
        raise UserError("the sandbox cannot limit network")

    monkeypatch.setattr(built_in, "make_sandbox", refuse)
    with pytest.raises(UserError, match="cannot limit network"):
        maker_for("python")
    assert Sandbox((), 1.0, 64).time_s == 1.0


def test_search_numbers_its_passages(tmp_path):
    pytest.importorskip("rank_bm25")
    (tmp_path / "p.jsonl").write_text('{"text": "a ship"}\n{"text": "a lion"}\n{"text": "the ship"}\n')
    file = str(tmp_path / "p.jsonl")
    assert said_by("search", call("search", "query", "ship"), file=file) == ("[1] a ship\n[2] the ship", ())
    assert said_by("search", call("search", "query", "tiger"), file=file, top=1) == ("nothing found", ())
    with pytest.raises(UserError, match=r"no such file; set arguments: \{file: "):
        maker_for("search")


# ---- passages are found by their words; a file that cannot be read says where


needs_bm25 = pytest.mark.skipif(find_spec("rank_bm25") is None, reason="needs rank-bm25")
TEXTS = ["The lion sleeps.", "A ship sails to the island.", "The ship sinks; the island does not.", "Gold!"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "passages.jsonl"
    path.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)) + "\n\n")
    return path


@needs_bm25
def test_passages_with_the_words_come_first(file):
    passages = read_passages(str(file), "text")
    assert passages.find("ISLAND, sails?", 3) == [TEXTS[1], TEXTS[2]]
    assert passages.find("the island", 9)[-1] == TEXTS[0], "the word that most have counts least"
    assert passages.find("gold", 1) == [TEXTS[3]] and passages.find("the", 1) == passages.find("the", 9)[:1]
    assert passages.find("tiger", 3) == passages.find("", 3) == []
    assert read_passages(str(file), "text") is passages


@needs_bm25
def test_equal_passages_keep_their_order(tmp_path):
    path = tmp_path / "same.jsonl"
    path.write_text('{"t": "a b", "n": 1}\n{"t": "b a"}\n{"t": "c"}\n')
    assert read_passages(str(path), "t").find("b a", 9) == ["a b", "b a"]


@needs_bm25
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
def test_a_bad_file_of_passages_says_where(tmp_path, text, why):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=why):
        read_passages(str(path), "text")
    with pytest.raises(DataError, match="no such file"):
        read_passages(str(tmp_path / "none.jsonl"), "text")
