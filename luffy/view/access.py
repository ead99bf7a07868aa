"""Access control. Runs hold unpublished data, and any web site open in the same browser can send requests here.

- The server listens on this machine alone by default, and on another address only with a token.
- The Host header must be a name of this server, which refuses DNS rebinding.
- Requests that a browser marks as coming from another site are refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from luffy.errors import UserError

TOKEN_VARIABLE = "LUFFY_VIEW_TOKEN"
SHORTEST_TOKEN = 16
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


class Refused(Exception):
    """A refused request: its status, and one line for the sender."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class AccessGate:
    """``host`` is the address that is listened on. ``session`` is the cookie that a browser gets for the token,
    which is neither stored there nor kept in the address bar."""

    host: str
    port: int
    token: str | None = None
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def cookie(self) -> str:
        return f"luffy_view_{self.port}"  # cookies are shared between the ports of a host

    def check(self, headers: Mapping[str, str], token: str | None) -> None:
        """Raise Refused unless the request may be answered; ``token`` is the one of the query."""
        self._check_host(headers.get("Host", ""))
        if not _is_own_request(headers):
            raise Refused(403, "asked for by another site; open the address itself")
        if self.token is not None and not self._is_known(headers, token):
            raise Refused(401, "needs the token: open the address that luffy view printed, with ?token=...")

    def _check_host(self, header: str) -> None:
        name, colon, port = header.rpartition(":")
        if not colon or port.endswith("]"):
            name, port = header, "80"
        if port != str(self.port) or not self._is_own(name):
            raise Refused(421, f"this server does not go by the name {header[:80]!r}; use the address it printed")

    def _is_own(self, name: str) -> bool:
        if name in LOOPBACK_NAMES or name == bracketed(self.host):
            return True
        if not _is_wildcard(self.host):
            return False
        return name in (socket.gethostname(), socket.getfqdn()) or _as_address(name.strip("[]")) is not None

    def _is_known(self, headers: Mapping[str, str], token: str | None) -> bool:
        assert self.token is not None
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        given = token or (bearer if scheme.lower() == "bearer" else "")
        return _equal(given, self.token) or _equal(self._session_of(headers), self.session)

    def _session_of(self, headers: Mapping[str, str]) -> str:
        """The session cookie. ``http.cookies`` would stop at the first cookie of another application that it cannot
        parse."""
        pairs = (pair.strip().partition("=") for pair in headers.get("Cookie", "").split(";"))
        return next((value for name, _, value in pairs if name == self.cookie), "")


def _is_own_request(headers: Mapping[str, str]) -> bool:
    """Whether the browser says that the request is the page's own. A link on another site may be followed, because then
    only the user reads the answer."""
    followed = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    return followed or headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none")


def check_address(host: str, token: str | None) -> None:
    """Refuse to listen on an address that others can reach without a token."""
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise UserError(
            f"the token has {len(token)} characters; use {SHORTEST_TOKEN} or more plain ones, "
            f"e.g. export {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
        )
    if token is None and not is_loopback(host):
        raise UserError(
            f"--host {host} can be reached by others, so it needs a token: export {TOKEN_VARIABLE}=$(openssl rand "
            f"-hex 16), or leave --host away and use ssh -L"
        )


def token_of_environment() -> str | None:
    """The token of the environment; every user of the machine could read one on the command line."""
    return os.environ.get(TOKEN_VARIABLE) or None


def is_loopback(host: str) -> bool:
    address = _as_address(host)
    return host == "localhost" if address is None else address.is_loopback


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_wildcard(host: str) -> bool:
    address = _as_address(host)
    return address is not None and address.is_unspecified


def _as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _equal(given: str, known: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), known.encode())
