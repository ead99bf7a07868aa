"""A teacher behind a server that calls tools, played in an environment."""

import json
import threading
import time

import pyarrow.parquet as pq
import pytest
from builders import write_rows
from commands import luffy
from conversing import Own
from test_prepare_traces import serve  # noqa: F401

from luffy.config import EnvironmentConfig
from luffy.conversations import Scoring, maker_of
from luffy.data import load_problems
from luffy.environments import protocol
from luffy.environments.kinds import maker_for
from luffy.errors import UserError
from luffy.prepare.endpoint import Endpoint, EndpointError, Reply
from luffy.prepare.endpoint_episodes import EndpointEpisode
from luffy.prepare.teachers import EndpointTeacher
from luffy.prepare.traces import prepare_traces
from luffy.types import Message, Problem, ToolCall


class Adder:
    """Adds whole numbers."""

    open = 0
    lock = threading.Lock()

    def __init__(self, slow: bool = False):
        self.slow, self.asked = slow, 0
        with Adder.lock:
            Adder.open += 1

    def reset(self, prompt: str) -> str:
        return " Use the tool." if prompt == "1+1+1" else ""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        if self.slow:
            time.sleep(5)
        self.asked += 1
        return a + b

    def close(self) -> None:
        with Adder.lock:
            Adder.open -= 1


class Judge(Adder):
    """Scores 1 if it was asked twice."""

    def get_reward(self) -> float:
        return float(self.asked == 2)


def says(content, *calls, finish=None, **more):
    made = [
        {"id": f"x{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": made} if made else {}), **more}
    return 200, {"choices": [{"message": message, "finish_reason": finish or ("tool_calls" if made else "stop")}]}, {}


def asks_to_add(a, b):
    return "add", json.dumps({"a": a, "b": b})


def chains(body, number):
    """Adds 1 to 1 and to that, then says what the tool said last."""
    results = [row["content"] for row in body["messages"] if row["role"] == "tool"]
    if len(results) < 2:
        return says(None, asks_to_add(1, 1) if not results else asks_to_add(int(results[0]), 1))
    return says(f"#### {results[-1]}")


def play_at(server, tmp_path, n=1, problems=("1+1+1",), api_key=None, retries=0, **environment):
    settings = {"name": f"{__name__}:Adder", "max_turns": 4, **environment}
    cfg = EnvironmentConfig(**settings)
    rules = Scoring(cfg, maker_of(cfg), failure=0.0)
    endpoint = Endpoint(server.url, "big", api_key=api_key, log_probs=False, retries=retries, first_wait_s=0.01)
    teacher = EndpointTeacher(endpoint, {"max_tokens": 50}, concurrency=4, rules=rules)
    path, out = tmp_path / "sums.jsonl", tmp_path / "traces.parquet"
    write_rows(path, ({"id": f"s{i}", "prompt": text, "answer": "3"} for i, text in enumerate(problems)))
    try:
        card = prepare_traces(str(path), out, teacher, "big", {"environment": settings}, n=n, reward="gsm8k")
    finally:
        assert Adder.open == 0, "every environment is closed"
    return card["counts"], pq.read_table(out).to_pylist()


def kept(rows):
    return [[turn["role"] for turn in trace["messages"]] for row in rows for trace in row["traces"]]


def test_calls_and_null_content_become_a_trace(serve, tmp_path):  # noqa: F811
    server = serve(chains)
    counts, rows = play_at(server, tmp_path, n=2, problems=("1+1+1", "2+1"))
    assert (counts["samples_kept"], counts["samples_repeated"], counts["samples_right"]) == (2, 2, 4)
    assert kept(rows) == [["assistant", "tool", "assistant", "tool", "assistant"]] * 2
    (trace,) = load_problems(str(tmp_path / "traces.parquet"))[0].traces
    first, reply, *_, last = trace.messages
    assert first.content == "" and first.tool_calls[0].arguments == {"a": 1, "b": 1} and reply.content == "2"
    assert last.content == "#### 3" and trace.teacher == "big"
    bodies = [body for _, _, body in server.requests]
    assert all(body["tools"][0]["function"]["name"] == "add" and "logprobs" not in body for body in bodies)
    assert {body["messages"][0]["content"] for body in bodies} == {"1+1+1 Use the tool.", "2+1"}
    assert len({body["seed"] for body in bodies}) == 4  # one an episode, the same in its turns
    longest = max(bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [row["role"] for row in longest] == ["user", "assistant", "tool", "assistant", "tool"]
    assert json.loads(longest[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 1}
    assert longest[2]["tool_call_id"] == longest[1]["tool_calls"][0]["id"]


def test_parallel_calls_are_answered_in_their_order(serve, tmp_path):  # noqa: F811
    def parallel(body, number):
        results = [row["content"] for row in body["messages"] if row["role"] == "tool"]
        return says(f"{results} #### {results[1]}") if results else says("Both.", asks_to_add(1, 1), asks_to_add(1, 2))

    server = serve(parallel)
    _, rows = play_at(server, tmp_path)
    assert kept(rows) == [["assistant", "tool", "tool", "assistant"]]
    assert [turn["content"] for turn in rows[0]["traces"][0]["messages"]][1:3] == ["2", "3"]
    *_, first, second = server.requests[-1][2]["messages"]
    assert first["tool_call_id"] != second["tool_call_id"]


def test_wrong_calls_are_answered_and_the_episode_goes_on(serve, tmp_path):  # noqa: F811
    turns = [("multiply", "{}"), ("add", '{"a": "x"}'), asks_to_add(1, 2)]

    def errs(body, number):
        results = [row["content"] for row in body["messages"] if row["role"] == "tool"]
        return says(None, turns[len(results)]) if len(results) < 3 else says(f"#### {results[-1]}")

    server = serve(errs)
    _, rows = play_at(server, tmp_path)
    said = [turn["content"] for turn in rows[0]["traces"][0]["messages"] if turn["role"] == "tool"]
    assert said[0].startswith("error: no tool 'multiply'") and said[1].startswith("error: ") and said[2] == "3"
    (tmp_path / "b").mkdir()
    counts, rows = play_at(server, tmp_path / "b", on_bad_call="end")
    assert (counts["samples_cut_off"], kept(rows)) == (1, [])


@pytest.mark.parametrize(
    "answer",
    [
        says("", ("add", "{broken")),  # a call that cannot be read
        says("#### 3", finish="length"),
        says(None, asks_to_add(1, 1)),  # for ever: the turns end
    ],
)
def test_episodes_that_do_not_end_well_are_no_traces(serve, tmp_path, answer):  # noqa: F811
    counts, rows = play_at(serve(lambda body, number: answer), tmp_path)
    assert (counts["samples_cut_off"], counts["problems_with_a_trace"], kept(rows)) == (1, 0, [])


def test_a_tool_that_hangs_ends_its_episode_alone(serve, tmp_path):  # noqa: F811
    settings = {"arguments": {"slow": True}, "timeout_s": 0.2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adder, "close", lambda self: setattr(Adder, "open", 0))  # the call that hangs holds its own
        counts, _ = play_at(serve(chains), tmp_path, **settings)
    assert (counts["samples_cut_off"], counts["samples"]) == (1, 1)


def test_the_environments_own_reward_counts(serve, tmp_path):  # noqa: F811
    counts, _ = play_at(serve(chains), tmp_path, name=f"{__name__}:Judge")
    assert counts["samples_right"] == 1
    (tmp_path / "b").mkdir()
    counts, _ = play_at(serve(lambda body, number: says("#### 3")), tmp_path / "b", name=f"{__name__}:Judge")
    assert (counts["samples_right"], counts["samples_wrong"]) == (0, 1)  # whatever the verifier says


@pytest.mark.parametrize("status", [401, 500])
def test_an_error_of_the_server_ends_the_run(serve, tmp_path, status):  # noqa: F811
    def fails(body, number):
        return chains(body, number) if number == 0 else (status, {"error": "sk-secret is no key"}, {})

    with pytest.raises(EndpointError, match=rf"/v1/chat/completions: HTTP {status}") as error:
        play_at(serve(fails), tmp_path, api_key="sk-secret")
    assert "sk-secret" not in str(error.value) and "\n" not in str(error.value)


def test_a_refused_turn_is_a_refused_sample(serve, tmp_path, caplog):  # noqa: F811
    def refuses(body, number):
        return (400, {"error": "too long"}, {}) if "2+1" in str(body) else chains(body, number)

    counts, rows = play_at(serve(refuses), tmp_path, problems=("1+1+1", "2+1"))
    assert (counts["problems_refused"], len(kept(rows))) == (1, 1) and "too long" in caplog.text


def test_the_command(serve, tmp_path):  # noqa: F811
    problems, out = tmp_path / "sums.jsonl", tmp_path / "t.parquet"
    write_rows(problems, [{"id": "s", "prompt": "1+1+1", "answer": "3"}])
    recipe = tmp_path / "adder.yaml"
    recipe.write_text(f"environment: {{name: '{__file__}:Adder', max_turns: 4}}\n")
    server = serve(chains)
    args = ("prepare", "traces", problems, "--out", out, "--endpoint", server.url, "--model", "big", "--n", 1)
    code, _, err = luffy(*args, "--environment", recipe, "--reward", "gsm8k")
    assert code == 0, err
    assert kept(pq.read_table(out).to_pylist()) == [["assistant", "tool", "assistant", "tool", "assistant"]]
    code, _, err = luffy(*args, "--environment", "tiny/luffy")
    assert code == 2 and "tiny/luffy: the recipe has no environment; name one that has" in err
    code, _, err = luffy(*args, "--environment", recipe, "--api", "completions")
    assert code == 2 and "--environment plays chats: drop --api" in err


def test_a_mistake_of_the_user_is_no_fault_of_an_episode(serve, tmp_path):  # noqa: F811
    with pytest.raises(UserError, match="Adder"):
        play_at(serve(chains), tmp_path, arguments={"quick": True})


class GoesOn(Own):
    answer = protocol.Reply((Message("user", "go on"),))


def play_alone(environment, ask, **settings):
    """The outcome of an episode with a teacher that ``ask`` stands for."""
    rules = Scoring(EnvironmentConfig(name="own", **settings), maker_for(environment), 0.0)
    chat_of = lambda problem: (Message("user", problem.prompt),)  # noqa: E731
    return EndpointEpisode(rules, ask, chat_of).play(Problem("p", "1+1+1", "3"), 5)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"first": b"x"}, "OddAnswer: the answer is a bytes"),
        ({"answer": None}, "TypeError: reply must return a Reply, not NoneType"),
        ({"answer": protocol.Reply(reward=float("nan"))}, "ValueError: a reward must be a finite number or None"),
        ({"total": "much"}, "ValueError: a reward must be a finite number or None, got 'much'"),
        ({"total": float("inf")}, "ValueError: a reward must be a finite number or None, got 'inf'"),
    ],
)
def test_an_environment_that_breaks_its_protocol_costs_its_episode(said, why):
    found = play_alone(type("Odd", (GoesOn,), said), lambda chat: Reply("go", "stop"), max_turns=2)
    assert (found.end, found.faults) == ("raised", ("raised",)) and found.message.startswith(why)
    assert found.reward is None


def test_an_outcome_has_turns_calls_faults_and_rewards():
    calls = iter([(ToolCall("multiply", {}),), (ToolCall("add", {"a": 1, "b": 2}),) * 2, ()])
    found = play_alone(Judge, lambda chat: Reply("so", "stop", calls=next(calls)), max_turns=3)
    assert (found.end, found.turns, found.calls, found.reward) == ("answer", 3, 3, 1.0)
    assert found.faults == ("unknown_tool",) and found.turn_rewards == (0.0, 0.0, 0.0)
    roles = [message.role for message in found.messages]
    assert roles == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]
    given = type("Given", (GoesOn,), {"answer": protocol.Reply((Message("user", "go on"),), reward=0.5)})
    found = play_alone(given, lambda chat: Reply("go", "stop"), max_turns=2)
    assert (found.end, found.turn_rewards, len(found.messages)) == ("turns", (0.5, 0.5), 3)


def test_an_episode_begins_with_its_problem_and_seed():
    begun = []
    noted = type("Noted", (GoesOn,), {"start": lambda self, problem, seed: begun.append((problem.id, seed))})
    assert play_alone(noted, lambda chat: Reply("go", "stop"), max_turns=1).end == "turns"
    assert begun == [("p", 5)]


def test_an_environment_that_is_made_too_late_is_closed():
    closed, may_go = threading.Event(), threading.Event()

    class Late(GoesOn):
        def __init__(self):
            may_go.wait(20)

        def close(self):
            closed.set()

    found = play_alone(Late, lambda chat: Reply("go", "stop"), timeout_s=0.1)
    assert found.end == "timed_out" and not closed.is_set()
    may_go.set()
    assert closed.wait(20)


def test_how_an_episode_ended_and_whose_reward_counts():
    over = type("Over", (GoesOn,), {"answer": protocol.Reply(done=True)})
    called = Reply("go", "stop", calls=(ToolCall("add", {}),))
    assert play_alone(over, lambda chat: called).end == "environment"
    found = play_alone(over, lambda chat: Reply("go", "stop"), reward="verifier")
    assert (found.end, found.reward) == ("answer", None)
