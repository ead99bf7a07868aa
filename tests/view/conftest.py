"""A server on a free port, and a way to ask it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
from run_folders import make_metric_row, make_sample_row, write_run  # noqa: F401

from luffy.view.server import ViewServer


class Client:
    """``ask("/api/state")`` -> (status, headers, body); JSON is read."""

    def __init__(self, server: ViewServer) -> None:
        self.server, self.port, self.url = server, server.server_port, server.url

    def ask(self, path, query=(), headers=None, method="GET", body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        target = (
            f"{path}?{urlencode(list(dict(query).items()) if isinstance(query, dict) else query)}" if query else path
        )
        connection.request(method, target, body=body, headers=headers or {})
        reply = connection.getresponse()
        raw = reply.read()
        connection.close()
        is_json = reply.headers.get("Content-Type", "").startswith("application/json")
        return reply.status, reply.headers, json.loads(raw) if is_json and raw else raw.decode()

    def get(self, path, **query):
        status, _, body = self.ask(path, query)
        assert status == 200, body
        return body

    @property
    def run(self):
        return self.get("/api/state")["methods"][0]["runs"][0]["id"]


@pytest.fixture
def serving():
    """``with serving([folder]) as client``."""

    @contextmanager
    def start(places: list[Path], **settings) -> Iterator[Client]:
        server = ViewServer(places, port=0, **settings)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    return start
