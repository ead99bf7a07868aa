"""The HTTP client of luffy: one time limit for the whole request, no redirects, no secret in a message.

It uses the standard library: huggingface_hub brings httpx or httpx2 depending on its release, and both apply their
limits to single reads, so a server that sends a byte now and then could hold a request forever.
"""

from __future__ import annotations

import io
import random
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar

from luffy.errors import UserError

Answer = TypeVar("Answer")

REFUSED = (400, 413, 422)  # the request itself is at fault: too long, or against the server's rules
RETRYABLE = (408, 409, 425, 429)  # and 500 or above
JSON_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
LONGEST_ANSWER = 1 << 30
SHOWN_BODY = 300
LONGEST_WAIT_S = 60.0
LONGEST_WISH_S = 3600.0  # a server that asks for a longer wait is ignored


class RequestFailed(Exception):
    """A request without a usable answer; the message contains no secret.

    ``status``: HTTP status, None without an answer; ``retryable``: another try may succeed; ``after_s``: wait that the
    server asked for; ``timed_out``: the time limit ended the request.
    """

    def __init__(
        self,
        why: str,
        status: int | None = None,
        retryable: bool = False,
        after_s: float | None = None,
        timed_out: bool = False,
    ) -> None:
        super().__init__(why)
        self.status, self.retryable, self.after_s, self.timed_out = status, retryable, after_s, timed_out

    @property
    def refused(self) -> bool:
        """Whether the server found fault with the request itself."""
        return self.status in REFUSED


class Stopped(Exception):
    """Retries ended because they were asked to stop."""


class Client:
    """Sends requests with ``headers``; the values in ``secrets`` are removed from every message.

    ``proxies``: use the proxies of the environment. They see the headers of http requests, so the default is none.
    """

    def __init__(
        self,
        headers: Mapping[str, str] = {},
        secrets: tuple[str, ...] = (),
        proxies: bool = False,
        longest_answer: int = LONGEST_ANSWER,
    ) -> None:
        self._headers = {**JSON_HEADERS, **headers}
        self._secrets = secrets
        self._longest = longest_answer
        handlers = () if proxies else (urllib.request.ProxyHandler({}),)
        self._opener = urllib.request.build_opener(NoRedirect, _TimedHandler, _TimedHTTPSHandler, *handlers)

    def send(self, address: str, content: bytes | None, timeout_s: float) -> bytes:
        """Body of the answer to a POST of ``content``, or to a GET if it is None; ``RequestFailed`` without one."""
        request = urllib.request.Request(address, content, self._headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                return self._body(response)
        except urllib.error.HTTPError as error:
            raise self._status_failure(error) from None  # its traceback would hold the headers
        except (OSError, HTTPException) as error:
            raise _connection_failure(error, timeout_s) from None

    def shown(self, body: bytes) -> str:
        """Start of a server's answer on one line, without secrets that some servers repeat."""
        text = body.decode("utf-8", "replace")
        for secret in filter(None, self._secrets):
            text = text.replace(secret, "***")
        return " ".join(text.split())[:SHOWN_BODY] or "(empty)"

    def _body(self, response: HTTPResponse) -> bytes:
        chunks, length = [], 0
        while chunk := response.read1(1 << 16):
            chunks.append(chunk)
            length += len(chunk)
            if length > self._longest:
                raise RequestFailed(f"an answer of more than {self._longest} bytes")
        return b"".join(chunks)

    def _status_failure(self, error: urllib.error.HTTPError) -> RequestFailed:
        retryable = error.code in RETRYABLE or error.code >= 500
        try:
            body = error.read(4096)
        except (OSError, HTTPException):
            body = b""
        return RequestFailed(f"HTTP {error.code}: {self.shown(body)}", error.code, retryable, retry_after(error))


def with_retries(
    ask: Callable[[], Answer], retries: int, first_wait_s: float, stop: threading.Event | None = None
) -> Answer:
    """Return ``ask()``, called again up to ``retries`` times after failures that may pass; ``Stopped`` once stopped."""
    stop = stop or threading.Event()
    for attempt in range(retries + 1):
        if stop.is_set():
            raise Stopped
        try:
            return ask()
        except RequestFailed as error:
            if not error.retryable or attempt == retries:
                tries = f" (tried {attempt + 1} times)" if attempt else ""
                raise RequestFailed(f"{error}{tries}", error.status, timed_out=error.timed_out) from None
            stop.wait(pause(first_wait_s, attempt, error.after_s))
    raise AssertionError("the last attempt returns or raises")


def checked_address(address: str, setting: str, example: str, key_setting: str) -> str:
    """``address`` without a slash at the end; a UserError if it is no http(s) address or contains a key."""
    parts = urllib.parse.urlsplit(address)
    if parts.username or parts.password or parts.query:
        raise UserError(f"{setting}: a key does not belong in an address; use {key_setting}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{setting}: {address!r} is not an address such as {example}")
    return address.rstrip("/")


def retry_after(error: urllib.error.HTTPError) -> float | None:
    """Seconds that a server asks to wait; None without a number, or for more than ``LONGEST_WISH_S``."""
    try:
        wanted = float(error.headers["Retry-After"])
    except (TypeError, ValueError):
        return None
    return max(wanted, 0.0) if wanted <= LONGEST_WISH_S else None


def pause(first_s: float, attempt: int, after_s: float | None) -> float:
    """Seconds to wait: what the server asked for, else doubling with jitter, so that threads do not return together."""
    wanted = first_s * 2**attempt * random.uniform(0.5, 1.0) if after_s is None else after_s
    return min(wanted, LONGEST_WAIT_S)


def _connection_failure(error: OSError | HTTPException, timeout_s: float) -> RequestFailed:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return RequestFailed(f"no answer in {timeout_s:g} s", retryable=True, timed_out=True)
    retryable = not isinstance(reason, ssl.SSLCertVerificationError)
    return RequestFailed(f"no connection ({type(reason).__name__}: {reason})", retryable=retryable)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would carry the Authorization header to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _TimedReader(io.RawIOBase):
    """Reads from a socket until ``deadline``; the socket's own timeout starts again with every byte."""

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


class _TimedResponse(HTTPResponse):
    """Response whose headers and body must arrive before ``deadline``."""

    def __init__(self, connection: socket.socket, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(connection, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedReader(connection, deadline))


class _TimedConnection(HTTPConnection):
    """Connection whose timeout covers the whole request: connecting, sending, headers and body."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        deadline = time.monotonic() + (self.timeout or 0.0)
        self.response_class = partial(_TimedResponse, deadline=deadline)  # type: ignore[assignment]


class _TimedHTTPSConnection(HTTPSConnection, _TimedConnection):
    """Encrypted connection with a timeout for the whole request."""


class _TimedHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_TimedConnection, request)


class _TimedHTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_TimedHTTPSConnection, request)
