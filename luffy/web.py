"""What every HTTP client here needs: no redirects, and no secret in a message."""

from __future__ import annotations

import urllib.request
from typing import Any

SHOWN_BODY = 300


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
