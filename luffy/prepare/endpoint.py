"""A client for OpenAI-compatible servers, on the standard library: one sample per request, bounded retries.

The API key lives in the request's header and nowhere else: messages are cleaned of it, and redirects, which would
carry the header to another host, are refused.
"""

from __future__ import annotations

import json
import math
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Any

from luffy.errors import UserError
from luffy.types import Message
from luffy.web import REFUSED, body_of, pause, retry_after, shown, timed_opener

FOR_THE_MOMENT = (408, 409, 425, 429)


class EndpointError(UserError):
    """A server that does not answer as asked; names the URL and the status."""


class Refused(Exception):
    """The server does not take this request; others it may."""


class Aborted(Exception):
    """Another request failed for good, so this one is not needed any more."""


@dataclass(frozen=True)
class Reply:
    """One sampled response. ``tokens`` are the server's words for its tokens, ``token_ids`` its ids where it says."""

    text: str
    finish: str
    tokens: tuple[str, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None


@dataclass
class Endpoint:
    """``url`` is the base, such as ``http://localhost:8000/v1``."""

    url: str
    model: str
    api: str = "chat"
    api_key: str | None = field(default=None, repr=False)
    log_probs: bool = True
    retries: int = 6
    first_wait_s: float = 1.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--endpoint {self.url}: give an http(s) address such as http://localhost:8000/v1")
        if parts.username or parts.password or parts.query:
            raise UserError("--endpoint: credentials do not belong in the address; use --api-key-env")
        if self.api not in ("chat", "completions"):
            raise UserError(f"--api {self.api} is unknown; known: chat, completions")
        path = "chat/completions" if self.api == "chat" else "completions"
        self.address = f"{self.url.rstrip('/')}/{path}"
        self._opener = timed_opener()
        self._stop = threading.Event()
        self._has_answered = False

    def abort(self) -> None:
        """End every waiting retry now."""
        self._stop.set()

    def sample(self, prompt: str | tuple[Message, ...], sampling: dict[str, Any]) -> Reply:
        """One response to a chat (or, for completions, to a text)."""
        body: dict[str, Any] = {"model": self.model, **sampling}
        if isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            body["messages"] = [asdict(message) for message in prompt]
        if self.log_probs:
            body["logprobs"] = True if self.api == "chat" else 0
        return self._post(body)

    # ---- HTTP

    def _post(self, body: dict[str, Any]) -> Reply:
        content = json.dumps(body).encode()
        for attempt in range(self.retries + 1):
            if self._stop.is_set():
                raise Aborted
            try:
                reply = self._reply(self._send(content))
            except _Retry as retry:
                if attempt == self.retries:
                    raise self._error(f"{retry.what} after {attempt + 1} attempts") from retry
                self._stop.wait(pause(self.first_wait_s, attempt, retry.after_s))
            else:
                self._has_answered = True
                return reply
        raise AssertionError("the last attempt returns or raises")

    def _send(self, content: bytes) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.address, content, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout_s) as response:
                raw = response.read()
        except urllib.error.HTTPError as error:
            raise self._status_error(error) from None  # its traceback would hold the header
        except (OSError, HTTPException) as error:
            raise self._connection_error(error) from None
        try:
            return json.loads(raw)
        except ValueError:
            raise self._no_reply(f"HTTP 200 with something that is not JSON: {self._cleaned(raw)}") from None

    def _status_error(self, error: urllib.error.HTTPError) -> Exception:
        body = body_of(error)
        what = f"HTTP {error.code} {error.reason}: {self._cleaned(body)}"
        if error.code in FOR_THE_MOMENT or error.code >= 500:
            return _Retry(what, retry_after(error))
        hint = "; give --no-logprobs" if self.log_probs and b"logprob" in body.lower() else ""
        failure = self._error(what + hint)
        return Refused(str(failure)) if error.code in REFUSED else failure

    def _connection_error(self, error: OSError | HTTPException) -> Exception:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        what = f"no connection ({type(reason).__name__}: {reason})"
        return self._error(what) if isinstance(reason, ssl.SSLCertVerificationError) else _Retry(what)

    def _no_reply(self, what: str) -> Exception:
        """A server that has answered before may do so again; another is none of its kind."""
        return _Retry(what) if self._has_answered else self._error(what)

    def _error(self, what: str) -> EndpointError:
        return EndpointError(f"{self.address}: {what}")

    def _cleaned(self, body: bytes) -> str:
        return shown(body, self.api_key)

    # ---- answers

    def _reply(self, answer: Any) -> Reply:
        try:
            choice = answer["choices"][0]
            text = whole_text(_chat_text(choice["message"]) if self.api == "chat" else choice["text"])
            tokens, log_probs = _log_probs(choice.get("logprobs"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            found = self._cleaned(json.dumps(answer).encode())
            raise self._no_reply(f"unexpected answer ({type(error).__name__} {error}): {found}") from None
        ids = choice.get("token_ids")
        return Reply(text, str(choice.get("finish_reason")), tokens, tuple(ids) if ids else None, log_probs)


class _Retry(Exception):
    """Worth another try."""

    def __init__(self, what: str, after_s: float | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.after_s = after_s


def _chat_text(message: Any) -> str:
    """Reasoning servers give the thoughts apart from the answer; a trace has both, as the model wrote them."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type", "text") == "text")
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    return f"<think>\n{thoughts.strip()}\n</think>\n\n{content.lstrip()}" if thoughts else content


def _log_probs(given: Any) -> tuple[tuple[str, ...] | None, tuple[float, ...] | None]:
    """Chat: ``{"content": [{"token", "logprob"}]}``; completions: ``{"tokens": [], "token_logprobs": []}``."""
    if not given:
        return None, None
    if given.get("content"):
        entries = given["content"]
        return tuple(entry["token"] for entry in entries), tuple(_number(entry["logprob"]) for entry in entries)
    if given.get("tokens"):
        return tuple(given["tokens"]), tuple(_number(value) for value in given["token_logprobs"])
    return None, None


def _number(value: Any) -> float:
    """NaN for what is no number."""
    return float(value) if isinstance(value, int | float) else math.nan


def whole_text(text: str) -> str:
    """Half of a surrogate pair, which no file can hold, becomes a replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
