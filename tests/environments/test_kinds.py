"""A recipe's name leads to an environment: registered, in a module, or in a file; mistakes show before a run begins."""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from luffy.environments.kinds import ENVIRONMENTS, environment, kind_of, maker_for
from luffy.environments.protocol import Reply, Turn
from luffy.environments.steps import StepEnvironment
from luffy.environments.tools import ToolEnvironment
from luffy.errors import ConfigError, UserError
from luffy.schema import knob
from luffy.types import Problem, ToolCall

PROBLEM = Problem("p", "2+3?", "5")

MINE = '''
    class Adder:
        def __init__(self, more=0):
            self.more = more

        def add(self, a: int) -> int:
            """Add.

            Args:
                a: A number.
            """
            return a + self.more

    def make_adder(more):
        return Adder(more)

    class Bare:
        def add(self, a): return a

    class Unclosed:
        def start(self, problem, seed): ...
        def reply(self, turn): ...

    class Misdescribed(Unclosed):
        tools = [{"name": "add"}]

        def close(self): ...

    def make_text():
        return "shop"

    def make_nothing():
        raise OSError("no shop")

    def make_exit():
        raise SystemExit(2)

    nothing = 3
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_tools.py").write_text(textwrap.dedent(MINE))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_tools", None)


@pytest.mark.parametrize("name", ["my_tools.py:Adder", "my_tools:Adder", "my_tools.py:make_adder"])
def test_a_users_class_or_function(mine, name):
    maker = maker_for(name, {"more": 3})
    assert [tool["function"]["name"] for tool in maker.tools] == ["add"] and not maker.gives_reward
    one, other = maker.make(), maker.make()
    assert one is not other and isinstance(one, ToolEnvironment) and one.start(PROBLEM, 0) == ""
    assert one.reply(Turn("", (ToolCall("add", {"a": 2}),))).messages[0].content == "5"


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("my_tools.py:Adder", {"les": 3}, "'environment.arguments' do not fit Adder: .*'les'"),
        ("my_tools.py:make_adder", {}, "'environment.arguments' do not fit make_adder: .*'more'"),
        ("my_tools.py:Nothing", {}, "'environment.name': my_tools.py has no class or function 'Nothing'"),
        ("my_tools.py:nothing", {}, "'environment.name': my_tools.py has no class or function 'nothing'"),
        ("other.py:Adder", {}, "'environment.name': no file 'other.py' in .*; run luffy in its folder"),
        ("my_tools.py:Bare", {}, "Bare.add cannot be described as a tool"),
        ("my_tools.py:Unclosed", {}, "Unclosed has start and reply, but no close; add it"),
        ("my_tools.py:Misdescribed", {}, "an environment's 'tools' must be JSON schemas"),
        ("my_tools.py:make_text", {}, "the tool str.maketrans does not name its arguments: str is no class of tools"),
        ("my_tools.py:make_nothing", {}, "'environment.name': make_nothing made no environment: OSError: no shop"),
        ("my_tools.py:make_exit", {}, "'environment.name': make_exit made no environment: SystemExit: 2"),
        ("calculater", {}, "'environment.name': unknown environment 'calculater'; known: .*calculator"),
        ("calculator", {"x": 1}, "'environment.arguments' do not fit Calculator"),
        ("python", {"seconds": 1}, "unknown key 'environment.arguments.seconds'"),
    ],
)
def test_mistakes_are_told_at_once(mine, name, arguments, why):
    with pytest.raises(UserError, match=why) as error:
        maker_for(name, arguments)
    assert "\n" not in str(error.value)


class Own:
    tools = ({"type": "function", "function": {"name": "x", "parameters": {}}},)

    def start(self, problem, seed): ...
    def reply(self, turn):
        return Reply(done=True)

    def reward(self): ...
    def close(self): ...


class Stepping:
    def reset(self): ...
    def step(self, text): ...


class Beginning:
    def init(self, messages): ...
    def step(self, text): ...


class ToolCalledStep(Stepping):
    def get_reward(self): ...


class Nothing:
    limit = 3

    def reset(self): ...


def test_kinds_are_told_apart_by_what_they_have():
    kinds = {Own: "own", Stepping: "steps", Beginning: "steps", ToolCalledStep: "tools"}
    assert {cls: kind_of(cls) for cls in kinds} == {cls: kind_of(cls()) for cls in kinds} == kinds
    with pytest.raises(UserError, match="Nothing is no environment: give it public methods"):
        maker_for(Nothing)


def test_makers_of_each_kind():
    own = maker_for(Own)
    assert isinstance(own.make(), Own) and own.tools == Own.tools and own.gives_reward
    steps = maker_for(lambda: Stepping())
    assert isinstance(steps.make(), StepEnvironment) and steps.tools == () and steps.gives_reward


def test_a_registered_environment_with_settings():
    @dataclass(frozen=True)
    class Settings:
        more: int = knob(1, "what is added", ge=0)

    @environment("test_adder", settings=Settings, own_reward=True)
    class Adder:
        def __init__(self, settings):
            self.more = settings.more

        def add(self, a: int) -> int:
            """Add.

            Args:
                a: A number.
            """
            return a + self.more

    try:
        maker = maker_for("test_adder", {"more": 5})
        assert maker.gives_reward
        assert maker.make().reply(Turn("", (ToolCall("add", {"a": 2}),))).messages[0].content == "7"
        chosen = ENVIRONMENTS.read({"name": "test_adder", "more": 6}, "environment")
        assert maker_for(chosen).make().reply(Turn("", (ToolCall("add", {"a": 2}),))).messages[0].content == "8"
        with pytest.raises(ConfigError, match=r"'environment.arguments.more' must be >= 0"):
            maker_for("test_adder", {"more": -1})
    finally:
        ENVIRONMENTS.entries.pop("test_adder")


def test_the_object_made_to_look_at_is_closed():
    closed = []

    class Closing(Own):
        def close(self):
            closed.append(self)

    maker_for(lambda: Closing())
    assert len(closed) == 1


def test_what_a_built_in_one_is_tried_with_is_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(ToolEnvironment, "close", lambda self: closed.append(self))
    maker_for("calculator")
    assert len(closed) == 1


class Telling(Stepping):
    def reset(self):
        return "x" * 99


class TellingOfRow(Telling):
    def __init__(self, extras): ...


class Limited(Own):
    max_reply_chars = 7


def test_answers_have_the_length_that_is_asked_for():
    for cls in (Telling, TellingOfRow):
        assert maker_for(cls, max_reply_chars=20).make().start(PROBLEM, 0) == "x" * 14 + " [cut]"
    assert maker_for(Limited, max_reply_chars=20).make().max_reply_chars == 20


def test_the_shop_of_the_page_is_an_environment():
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    space = {}
    exec(page.partition("```python\n")[2].partition("```")[0], space)
    maker = maker_for(space["Shop"])
    shop = maker.make()
    assert maker.gives_reward and shop.start(Problem("p", "", "", meta={"budget": 5}), 0) == "You have 5 coins."
    calls = tuple(ToolCall("buy", {"item": "lamp", "price": price}) for price in (6, 4))
    reply = shop.reply(Turn("", calls))
    assert [message.content for message in reply.messages] == ["error: ValueError: not enough coins", "1 coins left"]
    assert reply.faults == ("tool_raised",) and shop.reward() == 1.0
