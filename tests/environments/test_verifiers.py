"""Environments of the package verifiers: ``make test-verifiers`` brings it into an environment of its own."""

import signal
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from conversing import save_chat_model
from trainings import samples, train_rows

from luffy.environments.answers import EnvironmentLost
from luffy.environments.kinds import maker_for
from luffy.environments.protocol import Turn
from luffy.environments.verifiers import _loaded
from luffy.errors import ConfigError, UserError
from luffy.types import Message, Problem, ToolCall

NEEDS_IT = pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed: make test-verifiers")
PROMPT = (Message("system", "Add."), Message("user", "2+3"))
PROBLEM = Problem("p1", PROMPT, "5", meta={"info": {"level": 1}})

ENVIRONMENTS = '''
import time
import verifiers as vf

loads = []

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    if a == 13:
        raise ValueError("unlucky")
    return a + b

def correct(completion, answer, info, **kwargs) -> float:
    said = completion[-1].content if completion else ""
    return float(answer in said) + info["level"]

def adding(level=0):
    loads.append(level)
    return vf.ToolEnv(
        tools=[add], max_turns=4, rubric=vf.Rubric(funcs=[correct]),
        dataset=rows(),
    )

def rows():
    from datasets import Dataset
    return Dataset.from_list([{"prompt": [{"role": "user", "content": "2+3"}], "answer": "5", "info": {"level": 1}}])

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["prompt"] = [*state["prompt"], vf.UserMessage(content="Say a digit.")]
        return state

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == "break":
            raise vf.InfraError("the guest is gone")
        if said == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="Right.")]
        return [vf.UserMessage(content="Wrong. " + "." * (9000 if said == "long" else 0))]

class Forgetful(Guess):
    async def get_prompt_messages(self, state):
        return [vf.UserMessage(content=f"Turn {len(state['trajectory'])}.")]

def forgetting():
    return Forgetful(rubric=vf.Rubric(funcs=[turns]), dataset=rows())

def guessing():
    return Guess(max_turns=5, rubric=vf.Rubric(funcs=[turns]), dataset=rows())

async def turns(state) -> float:
    return float(len(state["trajectory"]))

def ranked():
    def rank(states, **kwargs) -> list[float]:
        return [0.0] * len(states)
    return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[rank]), dataset=rows())

def failing():
    raise OSError("no such model")

def odd():
    return "text"
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "sums_of_mine.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    yield "sums_of_mine.py"
    sys.modules.pop("sums_of_mine", None)
    _loaded.clear()


def adding_call(**arguments):
    return Turn("", (ToolCall("add", arguments),), text="<tool_call>")


@NEEDS_IT
def test_tools_are_called_and_the_rubric_scores(module):
    maker = maker_for("verifiers", {"id": f"{module}:adding", "arguments": {"level": 2}})
    (tool,) = maker.tools
    assert tool["function"]["name"] == "add" and set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    assert maker.gives_reward
    one, other = maker.make(), maker.make()
    assert one.start(PROBLEM, 0) == other.start(PROBLEM, 1) == ""
    assert one.reply(adding_call(a=2, b=3)).messages == (Message("tool", "5", name="add"),)
    assert "unlucky" in other.reply(adding_call(a=13, b=3)).messages[0].content
    assert one.reply(Turn("", fault="no JSON", text="<tool_call>{")).faults == ("unreadable_call",)
    assert one.reply(Turn("It is 5.", text="It is 5.")).done
    assert (one.reward(), other.reward()) == (2.0, 1.0)  # the other was ended by a limit
    for episode in (one, other):
        episode.close()
    assert sys.modules["sums_of_mine"].loads == [2]


@NEEDS_IT
def test_an_environment_may_speak_first_and_last(module):
    maker = maker_for("verifiers", {"id": f"{module}:guessing"}, max_reply_chars=100)
    episode = maker.make()
    assert episode.start(PROBLEM, 0) == "Say a digit."
    reply = episode.reply(Turn("long", text="long"))
    assert reply.faults == ("cut_answer",) and len(reply.messages[0].content) == 100
    assert episode.reply(Turn("5", text="5")).done and episode.reward() == 2.0
    episode.close()


@NEEDS_IT
@pytest.mark.parametrize(
    ("name", "error"), [("guessing", "broke off: .*the guest is gone"), ("forgetting", "rewrites earlier messages")]
)
def test_an_environment_that_breaks_ends_its_episode(module, name, error):
    episode = maker_for("verifiers", {"id": f"{module}:{name}"}).make()
    episode.start(PROBLEM, 0)
    with pytest.raises(EnvironmentLost, match=error):
        episode.reply(Turn("break", text="break"))
    episode.close()


@NEEDS_IT
def test_an_episode_that_never_began_is_closed(module):
    episode = maker_for("verifiers", {"id": f"{module}:guessing"}).make()
    assert episode.reward() is None
    episode.close()


@NEEDS_IT
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ranked", "scores groups of episodes together"),
        ("failing", "gave no environment: .*no such model"),
        ("odd", "but a str"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_what_cannot_be_played_is_one_line(module, name, error):
    with pytest.raises((UserError, ConfigError), match=error) as stop:
        maker_for("verifiers", {"id": f"{module}:{name}"})
    assert "\n" not in str(stop.value)


@NEEDS_IT
def test_an_environment_that_is_not_installed_is_named():
    with pytest.raises(UserError, match="no-such-environment"):
        maker_for("verifiers", {"id": "no-such-environment"})


@NEEDS_IT
def test_a_training_with_rows_of_the_environment(module, make_config, tmp_path):
    sys.path.insert(0, str(tmp_path))
    try:
        import sums_of_mine
    finally:
        sys.path.remove(str(tmp_path))
    sums_of_mine.adding().get_dataset().to_json(tmp_path / "rows.jsonl")
    cfg = make_config(
        model={"path": save_chat_model(tmp_path / "chat")},
        data={"train": str(tmp_path / "rows.jsonl"), "style": "chat", "max_prompt_tokens": 300},
        rollout={"n": 4, "max_tokens": 40},
        environment={"name": "verifiers", "arguments": {"id": f"{module}:adding"}, "max_turns": 3, "max_tokens": 200},
        guidance={"n_prefix": 0},
        batch={"problems": 1, "tokens": 4096},
        reward={"success": 2.0, "failure": 0.0},
        algorithm={"reject_extreme": False},
        train={"steps": 2},
    )
    rows = train_rows(cfg)
    assert [row["environment/turns"] >= 1 for row in rows] == [True, True]
    assert all(row.get("environment/fault/raised", 0) == 0 for row in rows)
    assert {sample["reward"] for sample in samples(cfg)} <= {1.0, 2.0}


STAND_IN = """
import asyncio
import signal
from types import SimpleNamespace

class Hanging:
    env_response, rubric, requires_group_rollouts, tool_defs = print, None, False, None
    cancelled = False

    async def rollout(self, row, client, *_):
        try:
            await client.get_response([SimpleNamespace(role="user", content="2+3")], "")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

class Limited:
    env_response, rubric, requires_group_rollouts, tool_defs = print, None, False, None

    def __init__(self):
        self.one_at_a_time = asyncio.Semaphore(1)

    async def rollout(self, row, client, *_):
        await client.get_response([SimpleNamespace(role="user", content="2+3")], "")
        async with self.one_at_a_time:
            await asyncio.sleep(0.01)
        return {}

def taking_signals(since=None):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return SimpleNamespace(env_response=print, rubric=None, requires_group_rollouts=False, tool_defs=None, since=since)

def exiting():
    raise SystemExit("usage: exiting --game GAME")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A file of environments that the package's absence does not stop from being loaded."""
    parts = {
        "envs.multiturn_env": {"MultiTurnEnv": None}, "utils.env_utils": {"load_environment": None},
        "clients": {"Client": type("Client", (), {"__init__": lambda *_: None})}, "errors": {"OverlongPromptError": None},
        "types": dict.fromkeys(("Response", "ResponseMessage", "ToolCall"), SimpleNamespace),
    }  # fmt: skip
    for name, fields in parts.items():
        monkeypatch.setitem(sys.modules, f"verifiers.{name}", SimpleNamespace(**fields))
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    yield "stand_in.py"
    sys.modules.pop("stand_in", None)
    _loaded.clear()


def test_the_trainer_keeps_the_signals_that_the_package_takes(stand_in):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        maker_for("verifiers", {"id": f"{stand_in}:taking_signals"})
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def test_episodes_share_what_belongs_to_an_event_loop(stand_in):
    maker = maker_for("verifiers", {"id": f"{stand_in}:Limited"})
    episodes = [maker.make() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda episode: episode.start(replace(PROBLEM, prompt="2+3"), 0), episodes))
        replies = pool.map(lambda episode: episode.reply(Turn("5", text="5")), episodes, timeout=30)
        assert [reply.done for reply in replies] == [True] * 4
        list(pool.map(lambda episode: episode.close(), episodes))


def test_an_episode_that_hangs_is_cancelled_when_it_is_closed(stand_in):
    episode = maker_for("verifiers", {"id": f"{stand_in}:Hanging"}).make()
    episode.start(replace(PROBLEM, prompt="2+3"), 0)
    ((env, _),) = _loaded.values()
    with ThreadPoolExecutor(2) as pool:
        hanging = pool.submit(episode.reply, Turn("5", text="5"))
        time.sleep(0.2)
        pool.submit(episode.close).result(timeout=10)
        assert isinstance(hanging.exception(timeout=10), CancelledError) and env.cancelled


def test_arguments_may_be_whatever_a_recipe_says(stand_in):
    arguments = {"since": {date(2024, 5, 1): [1], 2: None}}
    maker_for("verifiers", {"id": f"{stand_in}:taking_signals", "arguments": arguments})
    ((env, _),) = _loaded.values()
    assert env.since == arguments["since"]


def test_a_function_that_ends_the_process_is_one_line(stand_in):
    with pytest.raises(UserError, match=r"gave no environment: SystemExit: usage: exiting --game GAME$"):
        maker_for("verifiers", {"id": f"{stand_in}:exiting"})


def test_without_the_package_its_install_command_is_named(monkeypatch):
    for name in ("verifiers", "verifiers.envs.multiturn_env"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UserError, match=r"needs verifiers 0\.2 or 0\.3; install it with: pip install '\.\[verifiers\]'"
    ):
        maker_for("verifiers", {"id": "anything"})
