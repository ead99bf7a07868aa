"""The web server of ``luffy view``: the standard library's, one thread a connection, GET and nothing else."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from luffy.errors import UserError
from luffy.view.access import AccessGate, Refused, bracketed, check_address
from luffy.view.live import Board
from luffy.view.site import PageReply, Query, Site, as_json

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_FIELDS = 256  # of a query
IDLE_S = 60  # a silent connection is closed


class ViewServer(ThreadingHTTPServer):
    """``port`` 0 takes any free one. Serves after ``serve_forever`` is called."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, places: Sequence[Path], host: str = "127.0.0.1", port: int = 8181, token: str | None = None
    ) -> None:
        check_address(host, token)
        self.site = Site(Board(places))
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise UserError(
                f"cannot listen on {bracketed(host)}:{port} ({error.strerror}); choose another --port"
            ) from None
        self.gate = AccessGate(host, self.server_port, token)

    @property
    def url(self) -> str:
        """The address without the token, because printed lines end up in logs."""
        return f"http://{bracketed(self.gate.host)}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes the connection in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "luffy", ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        try:
            target = urlsplit(self.path)
            query = parse_qs(target.query, max_num_fields=MOST_FIELDS)
        except ValueError as error:
            self._send(as_json({"error": f"not an address: {error}"}, 400))
            return
        self._answer(target.path, query)

    def _answer(self, path: str, query: Query) -> None:
        token = query["token"][0] if "token" in query else None
        gate = self.server.gate
        try:
            gate.check(self.headers, token)  # type: ignore[arg-type]
        except Refused as refusal:
            self._send(as_json({"error": str(refusal)}, refusal.status))
            return
        if token is not None and gate.token is not None:
            self._let_in()
            return
        self._send(self.server.site.answer(path, query))

    def _let_in(self) -> None:
        """Answer a correct token with a cookie, and an address without it."""
        gate = self.server.gate
        cookie = f"{gate.cookie}={gate.session}; HttpOnly; SameSite=Strict; Path=/"
        self._send(PageReply("", status=303), {"Location": "/", "Set-Cookie": cookie})

    def refuse_method(self) -> None:
        self.close_connection = True  # what the request brings along is not read
        self._send(as_json({"error": "GET only"}, 405), {"Allow": "GET"})

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = refuse_method

    def _send(self, reply: PageReply, more: dict[str, str] | None = None) -> None:
        body = reply.body.encode()
        self.send_response(reply.status)
        for name, value in {**HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{reply.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a page that asks every two seconds would fill the terminal."""


def serve(server: ViewServer, say: Callable[[str], None]) -> None:
    """Serve until Ctrl+C."""
    say(f"viewing    {server.url}  (Ctrl+C ends)")
    if server.gate.token is not None:
        say("           add ?token=... once; the browser is remembered until the server ends")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("")
    finally:
        server.server_close()
