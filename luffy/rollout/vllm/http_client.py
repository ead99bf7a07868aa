"""One vLLM server, spoken to with the standard library. The key is in the request's header and nowhere else."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import Any

from luffy.errors import UserError
from luffy.files import as_object, json_value
from luffy.types import NO_LIMIT
from luffy.web import body_of, shown, timed_opener

HEALTH_TIMEOUT_S = 10.0
SERVER_ERRORS = 500


class ServerLost(Exception):
    """No answer, or none that a working server would give. The message names the server and why."""


class ServerTimeout(ServerLost):
    """No answer in the time that one may take."""


def key_from(variable: str) -> str:
    """The key that servers of `luffy serve` ask for; a server without one is not spoken to."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"environment variable {variable} (rollout.vllm.api_key_env) is empty; it holds the key of the vLLM "
            f"servers: export {variable}=$(openssl rand -hex 32), the same for `luffy serve` and `luffy train`"
        )
    return key


class Server:
    def __init__(self, url: str, key: str, timeout_s: float = 600.0, knob: str = "rollout.vllm.servers") -> None:
        """``knob``: where the address comes from, for the error of one that is none."""
        parts = urllib.parse.urlsplit(url)
        if parts.username or parts.password or parts.query:
            raise UserError(f"{knob}: a key does not belong in an address; use rollout.vllm.api_key_env")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise UserError(f"{knob}: {url} is not an address such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._remedy = f"name a vLLM server in {knob}"
        self._key = key
        # No proxy of the environment: it would be given the key.
        self._opener = timed_opener(urllib.request.ProxyHandler({}))

    def __repr__(self) -> str:
        return f"Server({self.url})"

    def post(self, path: str, body: dict[str, Any], **kinds: type) -> dict[str, Any]:
        """The answer; with ``kinds`` it must be an object that has values of these kinds under these keys."""
        return self._checked(path, self._send("POST", path, body, self.timeout_s), kinds)

    def get(self, path: str, **kinds: type) -> dict[str, Any]:
        """As ``post``, without a body."""
        return self._checked(path, self._send("GET", path, None, self.timeout_s), kinds)

    def first(self, path: str, entries: list[Any], **kinds: type) -> dict[str, Any]:
        """The first entry of a list in the answer from ``path``, checked as ``post`` checks answers."""
        if not entries:
            raise self.foreign(path, "an empty list")
        return self._checked(path, entries[0], kinds)

    def foreign(self, path: str, what: str) -> UserError:
        """The error for an answer that no vLLM server would give."""
        return UserError(f"{self.url}/{path}: {what}; {self._remedy}")

    def _checked(self, path: str, answer: Any, kinds: dict[str, type]) -> Any:
        return as_object(answer, f"{self.url}/{path}", self._remedy, **kinds) if kinds else answer

    def check_health(self) -> None:
        self._send("GET", "health", None, HEALTH_TIMEOUT_S)

    def rpc(self, method: str, **kwargs: Any) -> dict[str, Any]:
        """Call a method of the worker extension on every worker; the first one's answer, after all were looked at."""
        answers = self.post("collective_rpc", {"method": method, "kwargs": kwargs}, results=list)["results"]
        for answer in answers:
            if not isinstance(answer, dict) or "error" in answer:
                found = answer["error"] if isinstance(answer, dict) else answer
                raise UserError(f"{self.url}: {method} failed: {found}")
        return self.first("collective_rpc", answers)

    def model_entry(self) -> dict[str, Any]:
        """What the server says of its model: ``id``, and where it says so ``max_model_len``, a whole number."""
        path = "v1/models"
        entry = self.first(path, self.get(path, data=list)["data"], id=str)
        longest = entry.get("max_model_len")
        if longest is not None and not (isinstance(longest, int) and 0 < longest <= NO_LIMIT):
            raise self.foreign(path, f"needs a whole number as 'max_model_len', got {str(longest)[:40]!r}")
        return entry

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(f"{self.url}/{path}", content, headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                raw = response.read()
        except urllib.error.HTTPError as error:
            raise self._status_error(path, error) from None  # its traceback would hold the header
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, TimeoutError):
                raise ServerTimeout(f"{self.url}/{path}: no answer in {timeout_s:g} s") from None
            raise ServerLost(f"{self.url}/{path}: no answer ({type(reason).__name__}: {reason})") from None
        return json_value(raw, f"{self.url}/{path}", self._remedy) if raw and path != "health" else None

    def _status_error(self, path: str, error: urllib.error.HTTPError) -> Exception:
        what = f"{self.url}/{path}: HTTP {error.code}: {shown(body_of(error), self._key)}"
        if error.code >= SERVER_ERRORS:
            return ServerLost(what)
        if error.code in (401, 403):
            return UserError(f"{what}; the key in rollout.vllm.api_key_env is not the server's")
        if error.code == 404:
            return UserError(f"{what}; start the server with `luffy serve`, which opens what luffy needs")
        return UserError(what)
