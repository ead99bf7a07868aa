"""What every HTTP client here needs: a limit on the whole request, no redirects, and no secret in a message."""

from __future__ import annotations

import io
import random
import socket
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

REFUSED = (400, 413, 422)  # statuses of a request that is at fault itself: too long, or against the server's rules
SHOWN_BODY = 300
LONGEST_WAIT_S = 60.0
LONGEST_WISH_S = 3600.0  # of a server; one that asks for more is not heeded at all


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the Authorization header to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class TimedReader(io.RawIOBase):
    """What a connection receives until ``deadline``, in seconds of ``time.monotonic``; a TimeoutError after it. A
    socket's own timeout begins anew with every byte."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline
        self._received = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)
        return self._received.readinto(buffer)

    def close(self) -> None:
        self._received.close()
        super().close()


class TimedConnection(HTTPConnection):
    """Its timeout is that of the whole request: connecting, sending, headers and body."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        deadline = time.monotonic() + (self.timeout or 0.0)

        class TimedResponse(HTTPResponse):
            def __init__(self, connection: socket.socket, *args: Any, **kwargs: Any) -> None:
                super().__init__(connection, *args, **kwargs)
                self.fp.close()
                self.fp = io.BufferedReader(TimedReader(connection, deadline))

        self.response_class = TimedResponse


class TimedHTTPSConnection(HTTPSConnection, TimedConnection):
    """The same, encrypted."""


class TimedHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(TimedConnection, request)


class TimedHTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(TimedHTTPSConnection, request)


def timed_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Opens addresses without following redirects. The ``timeout`` that ``open`` needs holds for the whole request."""
    return urllib.request.build_opener(NoRedirect, TimedHandler, TimedHTTPSHandler, *handlers)


def shown(body: bytes, secret: str | None) -> str:
    """A server's words on one line, cut short, without the key that some servers repeat."""
    text = body.decode("utf-8", "replace")
    if secret:
        text = text.replace(secret, "***")
    return " ".join(text.split())[:SHOWN_BODY] or "(empty)"


def body_of(error: urllib.error.HTTPError) -> bytes:
    """The beginning of what a server says about a failure; empty where it cannot be read."""
    try:
        return error.read(4096)
    except (OSError, HTTPException):
        return b""


def retry_after(error: urllib.error.HTTPError) -> float | None:
    """Seconds that a server asks to wait; None for none, for a date, or for more than ``LONGEST_WISH_S``."""
    try:
        wanted = float(error.headers["Retry-After"])
    except (TypeError, ValueError):
        return None
    return max(wanted, 0.0) if wanted <= LONGEST_WISH_S else None


def pause(first_s: float, attempt: int, after_s: float | None) -> float:
    """Doubling, with jitter so that many threads do not come back together; the server's own wish first."""
    wanted = first_s * 2**attempt * random.uniform(0.5, 1.0) if after_s is None else after_s
    return min(wanted, LONGEST_WAIT_S)
