"""OpenEnv over its WebSocket: a stand-in that speaks as the server does; the package's own server if it is there."""

import json
import os
import socket
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest
from processes import wait_until

from luffy.environments.answers import EnvironmentLost
from luffy.environments.kinds import maker_for
from luffy.environments.openenv import MOST_BYTES
from luffy.environments.protocol import Reply, Turn
from luffy.errors import ConfigError
from luffy.types import Message, Problem

pytest.importorskip("websockets")
PROBLEM = Problem("p1", "Guess.", "7", meta={"level": "easy"})


def guessing(connection):
    """One session of the stand-in."""
    right = ""
    for text in connection:
        message = json.loads(text)
        observation = {"text": f"Guess a digit, {message['data'].get('level', 'any')}.", "metadata": {}}
        data = {"observation": observation, "reward": None, "done": False}
        if message["type"] == "reset":
            right = str(message["data"]["seed"] % 10)
        elif message["data"].get("message") == "crash":
            connection.send(json.dumps({"type": "error", "data": {"message": "crashed", "code": "EXECUTION_ERROR"}}))
            continue
        elif message["data"]["message"] == "vanish":
            return
        else:
            hit = message["data"]["message"].strip() == right
            data = {
                "observation": {"text": "Right." if hit else "Wrong.", "metadata": {}},
                "reward": 1.0 if hit else -0.5,
                "done": hit,
            }
        connection.send(json.dumps({"type": "observation", "data": data}))


@pytest.fixture(scope="module")
def stand_in():
    from websockets.sync.server import serve

    with serve(guessing, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def real():
    """A server of the package in an environment of its own: LUFFY_OPENENV_PYTHON=/path/to/its/python."""
    python = os.environ.get("LUFFY_OPENENV_PYTHON")
    if not python:
        pytest.skip("LUFFY_OPENENV_PYTHON names no Python with openenv")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, str(Path(__file__).with_name("openenv_server.py")), str(port)])
    try:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def told(text):
    return Message("user", text)


@pytest.mark.parametrize("kind", ["stand_in", "real"])
def test_an_episode(kind, request):
    url = request.getfixturevalue(kind)
    maker = maker_for("openenv", {"url": url, "observation": "text", "columns": ["level", "none"]})
    assert maker.tools == () and maker.gives_reward
    one, other = maker.make(), maker.make()
    assert one.start(PROBLEM, 17) == other.start(PROBLEM, 18) == "Guess a digit, easy."
    assert one.reply(Turn("8")) == Reply((told("Wrong."),), False, -0.5)
    assert other.reply(Turn("8")) == Reply((told("Right."),), True, 1.0)
    reply = one.reply(Turn("crash"))
    assert reply.faults == ("tool_raised",) and "crashed (EXECUTION_ERROR)" in reply.messages[0].content
    assert one.reply(Turn("7")) == Reply((told("Right."),), True, 1.0)
    assert (one.reward(), other.reward()) == (0.5, 1.0)
    for environment in (one, other):
        environment.close()


def test_all_of_an_observation_is_json(stand_in):
    environment = maker_for("openenv", {"url": stand_in}).make()
    assert environment.start(PROBLEM, 0) == '{"text": "Guess a digit, any."}'
    environment.close()
    wrong = maker_for("openenv", {"url": stand_in, "observation": "words"}).make()
    with pytest.raises(EnvironmentLost, match="no field 'words' in the observation; fields: text, metadata"):
        wrong.start(PROBLEM, 0)
    wrong.close()


def test_a_server_that_is_gone_ends_the_episode(stand_in):
    environment = maker_for("openenv", {"url": stand_in}).make()
    environment.start(PROBLEM, 0)
    with pytest.raises(EnvironmentLost, match="the OpenEnv server broke off: ConnectionClosed"):
        environment.reply(Turn("vanish"))
    environment.close()
    none = maker_for("openenv", {"url": "http://127.0.0.1:1"}).make()
    with pytest.raises(EnvironmentLost, match="no OpenEnv server at ws://127.0.0.1:1/ws: ConnectionRefused"):
        none.start(PROBLEM, 0)
    none.close()


class Connection:
    """As the client of websockets, to a server that says the same each time."""

    def __init__(self, address, **limits):
        self.address, self.limits, self.waits, self.closed = address, limits, [], False

    def send(self, text): ...
    def recv(self, timeout=None):
        self.waits.append(timeout)
        return '{"type": "observation", "data": {"observation": "o"}}'

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://localhost:8000/", "ws://localhost:8000/ws"),
        ("https://host/some", "wss://host/some/ws"),
        ("wss://host/ws/", "wss://host/ws"),
    ],
)
def test_a_session_has_its_address_and_limits_and_is_closed(monkeypatch, url, address):
    made = []
    monkeypatch.setattr("websockets.sync.client.connect", lambda *a, **k: made.append(Connection(*a, **k)) or made[-1])
    environment = maker_for("openenv", {"url": url, "timeout_s": 7}).make()
    assert environment.start(PROBLEM, 0) == "o" and not environment.reply(Turn("x")).done
    environment.close()
    (connection,) = made
    assert connection.address == address and connection.waits == [7, 7] and connection.closed
    assert connection.limits == {"open_timeout": 7, "close_timeout": 1, "max_size": MOST_BYTES}


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "ftp://host"])
def test_an_address_needs_a_scheme_and_a_host(url):
    with pytest.raises(ConfigError, match=r"'environment.arguments.url' must be an address"):
        maker_for("openenv", {"url": url})
