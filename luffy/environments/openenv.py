"""An OpenEnv server, spoken to over its WebSocket; one connection is one episode.

    environment: {name: openenv, arguments: {url: "http://localhost:8000", action: message}}

The policy's text is one field of the action. ``{"type": "reset", "data": {...}}`` and ``{"type": "step", "data": ...}``
are each answered by an observation with its reward and whether the episode is done, or by an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from luffy.environments.answers import EnvironmentLost
from luffy.environments.kinds import environment
from luffy.errors import ConfigError, needing
from luffy.schema import knob

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
MOST_BYTES = 16 << 20  # of a message
HIDDEN = ("metadata",)  # fields of an observation that are not for the policy


@dataclass(frozen=True)
class OpenEnvSettings:
    """Settings of the environment ``openenv``."""

    url: str = knob("", "the server's address", required=True)
    action: str = knob("message", "field of the action that gets the policy's text")
    observation: str = knob("", "field of the observation that the policy sees; empty: all, as JSON")
    columns: tuple[str, ...] = knob((), "columns of the row that reset gets, beside the seed")
    timeout_s: float = knob(60.0, "seconds to connect, and for each answer", gt=0)

    def check(self, where: str) -> None:
        """The address has a scheme that a WebSocket can follow."""
        scheme, separator, host = self.url.partition("://")
        if scheme not in SCHEMES or not separator or not host:
            raise ConfigError(f"'{where}.url' must be an address such as http://localhost:8000; got {self.url!r}")

    @property
    def socket(self) -> str:
        """The address of the WebSocket."""
        scheme, _, rest = self.url.partition("://")
        return f"{SCHEMES[scheme]}://{rest.rstrip('/').removesuffix('/ws')}/ws"


@environment("openenv", settings=OpenEnvSettings, own_reward=True)
class OpenEnv:
    """One session with the server: an environment with ``reset`` and ``step``."""

    def __init__(self, settings: OpenEnvSettings) -> None:
        with needing("environment openenv needs websockets", "environments"):
            from websockets.sync.client import connect
        self._settings, self._connect = settings, connect
        self._connection: Any = None

    def reset(self, seed: int, **row: Any) -> Any:
        """Connect, and begin an episode."""
        wanted = {name: row[name] for name in self._settings.columns if name in row}
        address, limit = self._settings.socket, self._settings.timeout_s
        try:
            self._connection = self._connect(address, open_timeout=limit, close_timeout=1, max_size=MOST_BYTES)
        except Exception as error:  # refused, no such host, no WebSocket there
            raise EnvironmentLost(f"no OpenEnv server at {address}: {type(error).__name__}: {error}") from error
        return self._asked("reset", {**wanted, "seed": seed})[0]

    def step(self, text: str) -> tuple[Any, float | None, bool]:
        """One action."""
        return self._asked("step", {self._settings.action: text})

    def close(self) -> None:
        """End the session."""
        if self._connection is not None:
            self._connection.close()

    def _asked(self, kind: str, data: Mapping[str, Any]) -> tuple[Any, float | None, bool]:
        """Observation, reward and end of one message."""
        try:
            self._connection.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._connection.recv(timeout=self._settings.timeout_s))
            found = answer["data"]
        except Exception as error:  # closed, too late, too large, no JSON: the session cannot go on
            raise EnvironmentLost(f"the OpenEnv server broke off: {type(error).__name__}: {error}") from error
        if answer.get("type") == "error":
            raise RuntimeError(f"{found.get('message', 'unknown error')} ({found.get('code', 'no code')})")
        return self._shown(found.get("observation")), found.get("reward"), bool(found.get("done"))

    def _shown(self, observation: Any) -> Any:
        if not isinstance(observation, Mapping):
            return observation
        if not self._settings.observation:
            return {name: value for name, value in observation.items() if name not in HIDDEN}
        if self._settings.observation not in observation:
            known = ", ".join(observation)
            raise EnvironmentLost(f"no field {self._settings.observation!r} in the observation; fields: {known}")
        return observation[self._settings.observation]
