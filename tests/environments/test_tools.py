"""A class as TRL takes it is an environment; nothing that the policy or a tool does wrong raises."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from luffy.environments.answers import EnvironmentLost
from luffy.environments.protocol import Reply, Turn
from luffy.environments.tools import ToolEnvironment
from luffy.errors import UserError
from luffy.types import Message, Problem, ToolCall

PROBLEM = Problem("p1", "2+3?", "5", meta={"budget": 4, "level": "easy"})


class Shop:
    def __init__(self):
        self.bought, self.closed = [], False

    def reset(self, budget, seed, answer="", other=7):
        self.budget = budget
        return f"You have {budget}, seed {seed}, answer {answer}, {other}."

    def buy(self, item: str, price: float = 1.0) -> str:
        """Buy an item.

        Args:
            item: What to buy.
            price: What it may cost.
        """
        self.bought.append((item, price, type(price).__name__))
        return f"bought {item}"

    def fail(self):
        """Raise."""
        raise ValueError("closed\non Sundays")

    def leave(self):
        """Exit."""
        raise SystemExit(3)

    def get_reward(self):
        return len(self.bought)

    def close(self):
        self.closed = True

    def _hidden(self):
        return None


def turn(*calls):
    return Turn("", tuple(ToolCall(name, arguments) for name, arguments in calls))


def tool(text, name=""):
    return Message("tool", text, name=name)


def test_an_episode():
    shop = Shop()
    environment = ToolEnvironment(shop)
    assert environment.start(PROBLEM, seed=3) == "You have 4, seed 3, answer 5, 7."
    assert environment.reply(turn(("buy", {"item": "a"}), ("buy", {"item": "b", "price": 2}))) == Reply(
        (tool("bought a", "buy"), tool("bought b", "buy"))
    )
    assert shop.bought == [("a", 1.0, "float"), ("b", 2.0, "float")]
    assert environment.reply(Turn("It is 5.")) == Reply(done=True)
    assert environment.reward() == 2.0
    environment.close()
    assert shop.closed


WRONG = [
    ("sell", {}, "unknown_tool", "error: no tool 'sell'; tools: buy, fail, leave"),
    ("_hidden", {}, "unknown_tool", "error: no tool '_hidden'; tools: buy, fail, leave"),
    ("reset", {}, "unknown_tool", "error: no tool 'reset'; tools: buy, fail, leave"),
    ("buy", {}, "wrong_arguments", "error: missing argument item; arguments: item, price"),
    ("buy", {"item": "a", "size": 1}, "wrong_arguments", "error: no argument size; arguments: item, price"),
    ("buy", {"item": 3}, "wrong_arguments", "error: item must be text"),
    ("buy", {"item": "a", "price": "1"}, "wrong_arguments", "error: price must be a number"),
    ("fail", {}, "tool_raised", "error: ValueError: closed on Sundays"),
    ("leave", {}, "tool_raised", "error: SystemExit: 3"),
]


@pytest.mark.parametrize(("name", "arguments", "kind", "text"), WRONG)
def test_what_is_wrong_is_told_and_counted(name, arguments, kind, text):
    reply = ToolEnvironment(Shop()).reply(turn((name, arguments), ("buy", {"item": "a"})))
    assert reply == Reply((tool(text, name), tool("bought a", "buy")), faults=(kind,))


def test_an_unreadable_call_is_told_and_the_others_are_answered():
    faulty = Turn("", (ToolCall("buy", {"item": "a"}),), "no valid JSON: '{'")
    reply = ToolEnvironment(Shop()).reply(faulty)
    assert reply.messages == (tool("bought a", "buy"), tool("error: the call cannot be read: no valid JSON: '{'"))
    assert reply.faults == ("unreadable_call",) and not reply.done
    assert not ToolEnvironment(Shop()).reply(Turn("", fault="no valid JSON: '{'")).done


def test_columns_of_a_row_replace_neither_seed_nor_answer():
    class Open:
        def reset(self, seed, answer, **row):
            return f"{seed} {answer} {row['id']} {row['prompt']} {row['level']} " + "!" * 90

    row = {"seed": 99, "answer": "6", "id": "other", "prompt": "4+5?", "level": "easy"}
    text = ToolEnvironment(Open(), {}, max_reply_chars=40).start(replace(PROBLEM, meta=row), seed=3)
    assert text.startswith("3 5 p1 2+3? easy !!!") and len(text) == 40


def test_a_tool_that_cannot_go_on_ends_the_episode():
    class Gone:
        def ask(self):
            """Ask."""
            raise EnvironmentLost("no server")

    with pytest.raises(EnvironmentLost, match="no server"):
        ToolEnvironment(Gone()).reply(turn(("ask", {})))


class Says:
    """Its only tool answers with what it was made with."""

    def __init__(self, answer):
        self.answer = answer

    def say(self):
        """Say it."""
        return self.answer


@pytest.mark.parametrize(
    ("answer", "text", "fault"),
    [
        ("as it is\n", "as it is\n", ()),
        (None, "", ()),
        (3, "3", ()),
        (2.5, "2.5", ()),
        (True, "true", ()),
        (np.int64(4), "4", ()),
        ({"ä": [1, None]}, '{"ä": [1, null]}', ()),
        ((1, 2), "[1, 2]", ()),
        ("\ud800x", "?x", ()),
        (b"x", "error: the answer is a bytes, not text or JSON", ("odd_answer",)),
        ([object()], "error: the answer is a list, not text or JSON", ("odd_answer",)),
        ("y" * 50, "y" * 24 + " [cut]", ("cut_answer",)),
    ],
)
def test_answers_become_text(answer, text, fault):
    reply = ToolEnvironment(Says(answer), max_reply_chars=30).reply(turn(("say", {})))
    shown = text if fault == ("odd_answer",) else text[:30]
    assert reply == Reply((tool(shown, "say"),), faults=fault)


class Slow:
    """Every method is async, and they share a lock of one loop."""

    async def reset(self, **row):
        self.lock = asyncio.Lock()
        self.waiting = asyncio.get_running_loop()
        return f"{sorted(row)}"

    async def ask(self, question: str) -> str:
        """Ask.

        Args:
            question: What to ask.
        """
        async with self.lock:
            assert asyncio.get_running_loop() is self.waiting
            await asyncio.sleep(0)
        return question.upper()

    async def get_reward(self):
        return 0.5

    async def close(self):
        self.waiting = None


def test_methods_may_be_async_and_share_a_loop_over_threads():
    slow = Slow()
    environment, answers = ToolEnvironment(slow), []
    assert environment.start(PROBLEM, 0) == "['answer', 'budget', 'id', 'level', 'prompt']"
    for word in ("a", "b"):
        thread = threading.Thread(
            target=lambda word=word: answers.append(environment.reply(turn(("ask", {"question": word}))))
        )
        thread.start()
        thread.join()
    assert [reply.messages[0].content for reply in answers] == ["A", "B"]
    assert environment.reward() == 0.5
    environment.close()
    assert slow.waiting is None


def test_a_reset_that_needs_a_missing_column_is_the_users_error():
    class Needs:
        def reset(self, target, **row): ...

        def look(self):
            """Look."""

    with pytest.raises(UserError, match="Needs.reset needs 'target', which row p1 does not have; columns: answer, "):
        ToolEnvironment(Needs()).start(PROBLEM, 0)


def test_a_chat_prompt_is_given_as_mappings():
    class Echo:
        def reset(self, prompt):
            return prompt[-1]["content"]

        def look(self):
            """Look."""

    chat = (Message("system", "Be brief."), Message("user", "Hi"))
    environment = ToolEnvironment(Echo())
    assert environment.start(Problem("p", chat, ""), 0) == "Hi"
    assert environment.reward() is None


@pytest.mark.parametrize("reward", [float("nan"), "1", b"1", [1], 1j])
def test_a_reward_that_is_no_number_raises(reward):
    class Odd(Says):
        def get_reward(self):
            return reward

    with pytest.raises(ValueError, match="a reward must be a finite number or None"):
        ToolEnvironment(Odd(1)).reward()
