"""The built-in environments, each played for a turn."""

import pytest

from luffy.environments import built_in
from luffy.environments.call_formats import read_turn
from luffy.environments.kinds import ENVIRONMENTS, maker_for
from luffy.environments.sandbox import Sandbox, without_network
from luffy.errors import ConfigError, UserError
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
