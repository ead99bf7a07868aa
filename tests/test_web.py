"""The HTTP client. tests/rewards/test_http_reward.py and tests/prepare/test_prepare_traces.py ask servers that hang,
drip and redirect through it."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from luffy.errors import UserError
from luffy.web import Client, RequestFailed, Stopped, checked_address, with_retries


@pytest.fixture
def address():
    class Echo(BaseHTTPRequestHandler):
        def answer(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer(self.headers["X-Key"].encode())

        def do_POST(self):
            self.answer(self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_get_and_post(address):
    client = Client({"X-Key": "sesame"}, ("sesame",))
    assert client.send(address, None, 5.0) == b"sesame"
    assert client.send(address, b"body", 5.0) == b"body"
    assert client.shown(b"a  sesame\n b") == "a *** b" and client.shown(b"") == "(empty)"


def test_an_answer_that_is_too_long_fails_for_good(address):
    with pytest.raises(RequestFailed, match="an answer of more than 10 bytes") as failed:
        Client(longest_answer=10).send(address, b"x" * 11, 5.0)
    assert not failed.value.retryable and not failed.value.timed_out


def test_a_proxy_of_the_environment_is_used_only_if_asked_for(address, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    monkeypatch.delenv("no_proxy", raising=False)
    assert Client().send(address, b"x", 5.0) == b"x"
    with pytest.raises(RequestFailed, match="no connection") as failed:
        Client(proxies=True).send(address, b"x", 5.0)
    assert failed.value.retryable


def test_retries_end_with_success_a_final_failure_or_a_stop():
    def failing(failures):
        left = list(failures)

        def ask():
            if left:
                raise left.pop(0)
            return "done"

        return ask

    passing = RequestFailed("busy", 503, retryable=True)
    assert with_retries(failing([passing, passing]), retries=2, first_wait_s=0.0) == "done"
    with pytest.raises(RequestFailed, match=r"^busy \(tried 2 times\)$") as failed:
        with_retries(failing([passing, passing]), retries=1, first_wait_s=0.0)
    assert failed.value.status == 503
    with pytest.raises(RequestFailed, match="^no$") as failed:
        with_retries(failing([RequestFailed("no", 400)]), retries=5, first_wait_s=0.0)
    assert failed.value.refused
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        with_retries(failing([]), retries=1, first_wait_s=0.0, stop=stop)


def test_addresses():
    assert checked_address("http://host:1/v1/", "--endpoint", "http://x", "--key") == "http://host:1/v1"
    for bad, message in {
        "ftp://host": "--endpoint: 'ftp://host' is not an address such as http://x",
        "http://": "is not an address",
        "http://me:secret@host": "a key does not belong in an address; use --key",
        "http://host/?key=secret": "a key does not belong in an address",
    }.items():
        with pytest.raises(UserError, match=message) as caught:
            checked_address(bad, "--endpoint", "http://x", "--key")
        assert "secret" not in str(caught.value)
