"""Access control of a vLLM server that luffy started.

vLLM's own key guards ``/v1`` only. The routes for weights, sleep and remote calls, which luffy needs, would stay open
to everybody who reaches the port, and one of them calls any method of a worker. This middleware asks for the key
everywhere but on ``/health``.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN_PATHS = ("/health",)
REFUSAL = b'{"error": "this server asks for its key in the Authorization header"}'

Send = Callable[[dict[str, Any]], Awaitable[None]]


class RequireKey:
    """ASGI middleware; the key is the server's VLLM_API_KEY."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        key = os.environ.get("VLLM_API_KEY", "")
        if not key:
            raise RuntimeError("VLLM_API_KEY is empty: start the server with `luffy serve`")
        self._app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: dict[str, Any]) -> bool:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        return hmac.compare_digest(given, self._wanted)


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": REFUSAL})
