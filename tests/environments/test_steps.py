"""Environments with reset and step: plain ones, gymnasium's, SkyRL-gym's."""

from dataclasses import replace

import pytest

from luffy.environments.answers import Faulty
from luffy.environments.kinds import maker_for
from luffy.environments.protocol import Reply, Turn
from luffy.environments.steps import StepEnvironment, action_in, added, extras_of, read_step
from luffy.types import Message, Problem

PROBLEM = Problem("p1", "Guess.", "7", meta={"high": 9})


def user(text):
    return Message("user", text)


class Guess:
    """The plain form."""

    def reset(self, answer, high):
        self.answer = answer
        return f"From 0 to {high}."

    def step(self, text):
        right = text.strip() == self.answer
        return ("Right." if right else "Wrong."), 1.0 if right else -0.25, right


def test_a_plain_environment():
    environment = StepEnvironment(Guess())
    assert environment.start(PROBLEM, 0) == "From 0 to 9." and environment.reward() is None
    assert environment.reply(Turn("3")) == Reply((user("Wrong."),), False, -0.25)
    assert environment.reply(Turn("", text="7")) == Reply((user("Right."),), True, 1.0)
    assert environment.reward() == 0.75
    environment.close()


class Async(Guess):
    async def step(self, text):
        return super().step(text)

    async def close(self):
        self.closed = True


def test_steps_may_be_async():
    guess = Async()
    environment = StepEnvironment(guess)
    environment.start(PROBLEM, 0)
    assert environment.reply(Turn("7")).done
    environment.close()
    assert guess.closed


class Bad(Guess):
    def __init__(self, result):
        self.result = result

    def step(self, text):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (KeyError("x"), "tool_raised", "error: KeyError: 'x'"),
        ("text", "tool_raised", "error: TypeError: step must return 3 to 5 values or a mapping, not str"),
        (
            {"obs": "o"},
            "tool_raised",
            "error: TypeError: a mapping that step returns must have observations, reward and done",
        ),
        (
            {"observation": "o", "reward": 1.0, "done": False},  # a key that is not read would be lost
            "tool_raised",
            "error: TypeError: a mapping that step returns must have observations, reward and done",
        ),
        (("o", "much", True), "tool_raised", "error: ValueError: a reward must be a finite number or None, got 'much'"),
        ((b"o", 1.0, True), "odd_answer", "error: the answer is a bytes, not text or JSON"),
    ],
)
def test_what_goes_wrong_is_told_and_counted(result, kind, text):
    assert StepEnvironment(Bad(result)).reply(Turn("x")) == Reply((user(text),), faults=(kind,))


def test_forms_of_a_step():
    assert read_step(("o", 1, False)) == read_step(("o", 1, False, {})) == ("o", 1.0, False)
    assert read_step(("o", None, False, True, {})) == ("o", None, True)
    assert read_step({"observations": [], "reward": 2, "done": True, "metadata": {}}) == ([], 2.0, True)
    long = StepEnvironment(Bad(("x" * 99, 1.0, False)), max_reply_chars=20).reply(Turn("a"))
    assert len(long.messages[0].content) == 20 and long.faults == ("cut_answer",)
    assert StepEnvironment(Bad((None, 1.0, True))).reply(Turn("a")) == Reply((), True, 1.0)


class Discrete:
    def __init__(self, n, start=0):
        self.n, self.start = n, start


def test_actions_of_a_discrete_space():
    assert action_in("<think>1 or 2</think>I take 3, no: 2.", Discrete(4)) == 2
    assert action_in("-1", Discrete(2, start=-1)) == -1
    assert action_in("north") == "north"
    for text in ("north", "4", "-1", "9" * 500, "", "<think>2</think>north"):
        with pytest.raises(Faulty, match="one whole number from 0 to 3"):
            action_in(text, Discrete(4))


def test_columns_of_a_row_that_are_not_for_everyone():
    class Gym:
        def reset(self, seed=None, options=None):
            return f"{seed} {options}", {}

        def step(self, action):
            return "", 0.0, True, False, {}

    row = replace(PROBLEM, meta={"options": "a or b", "reward_spec": {"ground_truth": "8"}})
    assert StepEnvironment(Gym()).start(row, 3) == "3 None", "options are gymnasium's own, and no text"
    assert extras_of(row)["reward_spec"] == {"ground_truth": "8"}
    assert extras_of(PROBLEM)["reward_spec"] == {"ground_truth": "7"}, "the answer, where the row has none"


def test_what_init_adds_to_the_prompt():
    prompt = [{"role": "user", "content": "Hi"}]
    assert added(prompt, prompt) == added(prompt, []) == ""
    assert added(prompt, [*prompt, {"role": "user", "content": "More"}]) == "More"
    assert added(prompt, [{"role": "user", "content": "Hi\nMore"}]) == "More"


def test_a_real_gymnasium_environment():
    pytest.importorskip("gymnasium")
    maker = maker_for("gymnasium:make", {"id": "FrozenLake-v1", "is_slippery": False})
    assert maker.tools == () and maker.gives_reward
    environment = maker.make()
    assert environment.start(PROBLEM, 3) == "0"
    replies = [environment.reply(Turn(str(action))) for action in (1, 1, 2, 2, 1, 2)]
    assert [reply.messages[0].content for reply in replies] == ["4", "8", "9", "10", "14", "15"]
    assert [reply.done for reply in replies] == [False] * 5 + [True] and environment.reward() == 1.0
    environment.close()


def test_real_environments_of_skyrl_gym():
    pytest.importorskip("skyrl_gym")
    maker = maker_for("skyrl_gym:make", {"id": "gsm8k_multi_turn"})
    environment = maker.make()
    assert environment.start(PROBLEM, 0) == ""
    assert maker.tools == () and maker.gives_reward
    first = environment.reply(Turn("I think.\n#### 6"))
    assert not first.done and [message.role for message in first.messages] == ["user"]
    last = environment.reply(Turn("", text="So it is\n#### 7"))
    assert last.done and environment.reward() == first.reward + last.reward and last.reward == 1.0
    environment.close()
    single = maker_for("skyrl_gym.envs.gsm8k.env:GSM8kEnv").make()
    single.start(PROBLEM, 0)
    assert single.reply(Turn("#### 7")) == Reply((), True, 1.0)
