"""What every HTTP client here needs: no redirects, and no secret in a message."""

from __future__ import annotations

import random
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

REFUSED = (400, 413, 422)  # statuses of a request that is at fault itself: too long, or against the server's rules
SHOWN_BODY = 300
LONGEST_WAIT_S = 60.0


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the Authorization header to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


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
    """Seconds that a server asks to wait; None for none, or for a date."""
    try:
        return max(float(error.headers["Retry-After"]), 0.0)
    except (TypeError, ValueError):
        return None


def pause(first_s: float, attempt: int, after_s: float | None) -> float:
    """Doubling, with jitter so that many threads do not come back together; the server's own wish first."""
    wanted = first_s * 2**attempt * random.uniform(0.5, 1.0) if after_s is None else after_s
    return min(wanted, LONGEST_WAIT_S)
