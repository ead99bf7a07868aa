"""Client of one vLLM server. The key is in the request's header and in no message."""

from __future__ import annotations

import json
import os
import urllib.parse
from typing import Any

from luffy.errors import UserError
from luffy.files import as_object, json_value
from luffy.types import NO_LIMIT
from luffy.web import Client, RequestFailed, checked_address

HEALTH_TIMEOUT_S = 10.0
SERVER_ERRORS = 500
WITHOUT_JSON = ("health", "v1/load_lora_adapter", "v1/unload_lora_adapter")  # what they answer is no JSON
VLLM_SLOTS = 256  # unless rollout.slots says otherwise: vLLM's own default


class ServerLost(Exception):
    """No answer, or none that a working server would give. The message names the server and why."""


class ServerTimeout(ServerLost):
    """No answer in the time that one may take."""


def key_from(variable: str) -> str:
    """Key of the servers that `luffy serve` starts; a UserError if it is empty."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"environment variable {variable} (rollout.vllm.api_key_env) is empty; it holds the key of the vLLM "
            f"servers: export {variable}=$(openssl rand -hex 32), the same for `luffy serve` and `luffy train`"
        )
    return key


class Server:
    def __init__(self, url: str, key: str, timeout_s: float = 600.0, knob: str = "rollout.vllm.servers") -> None:
        """``knob``: the setting that holds the address, for errors."""
        self.url = checked_address(url, knob, "http://127.0.0.1:8000", "rollout.vllm.api_key_env")
        if urllib.parse.urlsplit(self.url).path:
            raise UserError(f"{knob}: {url} is not an address such as http://127.0.0.1:8000")
        self.timeout_s = timeout_s
        self.adapter: str | None = None  # what requests name instead of the model, where adapters are pushed alone
        self._remedy = f"name a vLLM server in {knob}"
        self._client = Client({"Authorization": f"Bearer {key}"}, (key,))

    def __repr__(self) -> str:
        return f"Server({self.url})"

    def post(self, path: str, body: dict[str, Any], **kinds: type) -> dict[str, Any]:
        """The answer; with ``kinds`` it must be an object with values of these types under these keys."""
        return self._checked(path, self._send(path, body, self.timeout_s), kinds)

    def get(self, path: str, **kinds: type) -> dict[str, Any]:
        """Same as ``post``, without a body."""
        return self._checked(path, self._send(path, None, self.timeout_s), kinds)

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
        self._send("health", None, HEALTH_TIMEOUT_S)

    def rpc(self, method: str, **kwargs: Any) -> dict[str, Any]:
        """Call a method of the worker extension on every worker; the first answer, if none has an error."""
        answers = self.post("collective_rpc", {"method": method, "kwargs": kwargs}, results=list)["results"]
        for answer in answers:
            if not isinstance(answer, dict) or "error" in answer:
                found = answer["error"] if isinstance(answer, dict) else answer
                raise UserError(f"{self.url}: {method} failed: {found}")
        return self.first("collective_rpc", answers)

    def model_entry(self) -> dict[str, Any]:
        """The server's entry of its model: ``id`` and, if the server tells it, ``max_model_len``."""
        path = "v1/models"
        entry = self.first(path, self.get(path, data=list)["data"], id=str)
        longest = entry.get("max_model_len")
        if longest is not None and not (isinstance(longest, int) and 0 < longest <= NO_LIMIT):
            raise self.foreign(path, f"needs a whole number as 'max_model_len', got {str(longest)[:40]!r}")
        return entry

    def _send(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        """The answer to a POST of ``body``, or to a GET without one."""
        address = f"{self.url}/{path}"
        try:
            raw = self._client.send(address, None if body is None else json.dumps(body).encode(), timeout_s)
        except RequestFailed as error:
            raise _error(f"{address}: {error}", error) from None
        return json_value(raw, address, self._remedy) if raw and path not in WITHOUT_JSON else None


def _error(what: str, error: RequestFailed) -> Exception:
    if error.timed_out:
        return ServerTimeout(what)
    if error.status is None or error.status >= SERVER_ERRORS:
        return ServerLost(what)
    if error.status in (401, 403):
        return UserError(f"{what}; the key in rollout.vllm.api_key_env is not the server's")
    if error.status == 404:
        return UserError(f"{what}; start the server with `luffy serve`, which opens what luffy needs")
    return UserError(what)
