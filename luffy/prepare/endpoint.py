"""Client for OpenAI-compatible servers: one sample per request, bounded retries."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luffy.data.chats import parsed_json, with_thoughts
from luffy.data.prompts import template_rows
from luffy.errors import UserError
from luffy.prepare.journal import whole_text
from luffy.types import Message, ToolCall
from luffy.web import Client, RequestFailed, checked_address, with_retries

CUT_OFF = ("length", "content_filter", "abort")  # reasons why a response is not finished


class EndpointError(UserError):
    """A server that does not answer as asked; names the address and the status."""


class Refused(Exception):
    """The server refuses this request; it may accept others."""


@dataclass(frozen=True)
class Reply:
    """One sampled response; ``tokens`` are strings, ``token_ids`` the server's ids if it sends them."""

    text: str
    finish: str
    tokens: tuple[str, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    calls: tuple[ToolCall, ...] = ()
    fault: str = ""  # why a call cannot be read


@dataclass
class Endpoint:
    """Server at the base address ``url``, such as ``http://localhost:8000/v1``."""

    url: str
    model: str
    api: str = "chat"
    api_key: str | None = field(default=None, repr=False)
    log_probs: bool = True
    retries: int = 6
    first_wait_s: float = 1.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        base = checked_address(self.url, "--endpoint", "http://localhost:8000/v1", "--api-key-env")
        if not self.model:
            raise UserError("--endpoint needs --model, the model's name at the server")
        if self.api not in ("chat", "completions"):
            raise UserError(f"--api {self.api} is unknown; known: chat, completions")
        self.address = f"{base}/{'chat/completions' if self.api == 'chat' else 'completions'}"
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self._client = Client(key, (self.api_key or "",), proxies=True)  # a teacher may be outside the local network
        self._stop = threading.Event()
        self._has_answered = False

    def abort(self) -> None:
        """End all waiting retries now: ``sample`` raises ``Stopped``."""
        self._stop.set()

    def sample(
        self, prompt: str | tuple[Message, ...], sampling: dict[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Reply:
        """One response to a chat (or, for completions, to a text), which may call ``tools``, JSON schemas."""
        body: dict[str, Any] = {"model": self.model, **sampling}
        if isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            body["messages"] = [_openai_row(row) for row in template_rows(prompt, lambda text: text)]
        if tools:
            body["tools"] = list(tools)
        if self.log_probs:
            body["logprobs"] = True if self.api == "chat" else 0
        content = json.dumps(body).encode()
        try:
            reply = with_retries(lambda: self._reply(content), self.retries, self.first_wait_s, self._stop)
        except RequestFailed as error:
            raise self._final_error(error) from None
        self._has_answered = True
        return reply

    def _final_error(self, error: RequestFailed) -> Exception:
        hint = "; give --no-logprobs" if error.status and self.log_probs and "logprob" in str(error).lower() else ""
        what = f"{self.address}: {error}{hint}"
        return Refused(what) if error.refused else EndpointError(what)

    def _reply(self, content: bytes) -> Reply:
        raw = self._client.send(self.address, content, self.timeout_s)
        try:
            return self._parsed(json.loads(raw))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
            why = f"unexpected answer ({type(error).__name__} {error}): {self._client.shown(raw)}"
            # A server that has answered before may do so again; another is not an OpenAI-compatible one.
            raise RequestFailed(why, retryable=self._has_answered) from None

    def _parsed(self, answer: Any) -> Reply:
        choice = answer["choices"][0]
        text = whole_text(_chat_text(choice["message"]) if self.api == "chat" else choice["text"])
        tokens, log_probs = _log_probs(choice.get("logprobs"))
        ids = choice.get("token_ids")
        finish, calls = str(choice.get("finish_reason")), _calls(choice["message"]) if self.api == "chat" else ((), "")
        return Reply(text, finish, tokens, tuple(ids) if ids else None, log_probs, *calls)


def _calls(message: Any) -> tuple[tuple[ToolCall, ...], str]:
    """The tool calls of a message, and why one cannot be read; no calls then."""
    calls = []
    for call in message.get("tool_calls") or ():
        name, arguments = whole_text(call["function"]["name"]), parsed_json(call["function"].get("arguments") or {})
        if not isinstance(arguments, dict):
            return (), f"the arguments of a call of {name[:64]} are no JSON object"
        calls.append(ToolCall(name, arguments))
    return tuple(calls), ""


def _openai_row(row: dict[str, Any]) -> dict[str, Any]:
    """A message as servers take it: arguments of calls are JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in row.get("tool_calls", ())
    ]
    return {**row, "tool_calls": calls} if calls else row


def _chat_text(message: Any) -> Any:
    """Thoughts and answer as the model wrote them; reasoning servers send them apart."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type", "text") == "text")
    return with_thoughts({**message, "role": "assistant", "content": content})["content"]


def _log_probs(given: Any) -> tuple[tuple[str, ...] | None, tuple[float, ...] | None]:
    """Tokens and log-probs from ``{"content": [{"token", "logprob"}]}`` (chat) or ``{"tokens", "token_logprobs"}``."""
    if not given:
        return None, None
    if given.get("content"):
        entries = given["content"]
        return tuple(entry["token"] for entry in entries), tuple(_number(entry["logprob"]) for entry in entries)
    if given.get("tokens"):
        return tuple(given["tokens"]), tuple(_number(value) for value in given["token_logprobs"])
    return None, None


def _number(value: Any) -> float:
    """``value`` as a float, NaN if it is no number."""
    return float(value) if isinstance(value, int | float) else math.nan
